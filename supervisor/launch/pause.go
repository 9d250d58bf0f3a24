package launch

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Pause is a pod's pause to launch.
type Pause struct {
	ID            string
	Dir           string // gets the exec barrier, FIFOFile
	Spec          *specs.Spec
	SystemdCgroup bool
}

// FIFOFile is the name of the exec barrier, libcontainer's too: whoever reads from it starts
// the program.
const FIFOFile = "exec.fifo"

// Pause brings a pause to the exec barrier. After an error nothing is left of it: no
// process, cgroup or fifo.
func (l *Launcher) Pause(ctx context.Context, p Pause) (*Launched, error) {
	a, err := l.newAttempt([3]*os.File{}) // it has none
	if err != nil {
		return nil, err
	}
	defer a.close()
	m, resources, err := pauseCgroups(p)
	if err != nil {
		return nil, fmt.Errorf("the cgroups of a pause: %w", err)
	}
	made, err := a.pause(ctx, p, m, resources)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("launch %s: %w", p.Spec.Process.Args[0], err), a.undo(p, m))
	}
	made.Cgroups = maps.Clone(m.GetPaths())
	return made, nil
}

// pause makes the cgroups and the process. systemd makes none without a process: it gets
// the first one, whose children are then there too.
func (a *attempt) pause(ctx context.Context, p Pause, m cgroups.Manager, r *cgroups.Resources) (*Launched, error) {
	const noProcess = -1
	var enter map[string]string
	if !p.SystemdCgroup {
		if err := setCgroups(m, r, noProcess); err != nil {
			return nil, err
		}
		enter = m.GetPaths()
	}
	if err := a.fillPause(p, enter); err != nil {
		return nil, err
	}
	first, err := a.fork()
	if err != nil {
		return nil, err
	}
	if p.SystemdCgroup {
		if err := setCgroups(m, r, first.PID); err != nil {
			return nil, err
		}
	}
	return a.run(ctx)
}

// endLimit is how long a process may take to end that was killed, before its cgroups
// stay: one that is frozen, or in an uninterruptible sleep, ends when it can.
const endLimit = time.Second

// undo removes what a pause that failed has made.
func (a *attempt) undo(p Pause, m cgroups.Manager) error {
	_ = a.ours.Close() // what waits to be told to go on, ends
	a.endParents()
	if a.made != nil {
		select {
		case <-a.made.Child.Exited():
		case <-time.After(endLimit):
		}
	}
	err := m.Destroy()
	if e := os.Remove(filepath.Join(p.Dir, FIFOFile)); !errors.Is(e, os.ErrNotExist) {
		err = errors.Join(err, e)
	}
	return err
}

// fillPause opens what the process needs, and adds all calls up to the exec: what
// libcontainer's init makes of such a container (standard_init_linux.go), on mounts that are
// made beforehand.
func (a *attempt) fillPause(p Pause, enter map[string]string) error {
	spec := p.Spec
	filter, err := a.launcher.filters.of(spec.Linux.Seccomp)
	if err != nil {
		return err
	}
	fifo, err := a.give(makeFIFO(filepath.Join(p.Dir, FIFOFile)))
	if err != nil {
		return err
	}
	empty, err := a.launcher.mounts()
	if err != nil {
		return err
	}
	mounts := a.lend(empty)
	trees, err := a.giveTrees(spec)
	if err != nil {
		return err
	}
	a.add("close the program", unix.SYS_CLOSE, programFD)
	a.setOOMScoreAdj(spec.Process.OOMScoreAdj)
	if err := a.enterCgroups(enter); err != nil {
		return err
	}
	a.joinNetwork(spec.Linux.Namespaces)
	a.add("join the empty mount namespace", unix.SYS_SETNS, mounts, unix.CLONE_NEWNS)
	a.forkLast(newNamespaces(spec.Linux.Namespaces))
	if a.joinKeyring(p.ID) {
		a.put("set the permissions of the session keyring", secondKept, unix.SYS_KEYCTL, []uint64{unix.KEYCTL_SETPERM, 0, sessionKeyringPerm})
	}
	a.mountRoot(spec, trees)
	a.add("close the mounts", unix.SYS_CLOSE_RANGE, fifo+1, ^uint64(0)>>32, 0)
	a.changeRoot(spec.Root.Path)
	a.nameHost(spec.Hostname)
	a.writeSysctls(spec.Linux.Sysctl)
	a.add("set no_new_privs", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1)
	if err := a.becomeUser(spec.Process.User, spec.Process.Capabilities); err != nil {
		return err
	}
	a.executePause(spec.Process.Args, filter, fifo)
	return nil
}

// sessionKeyringPerm is what a new session keyring may be used for (all by its
// possessor but to set attributes; view, read and link by its user), and search by
// its user, as libcontainer sets it (keyctl_setperm(3)).
const sessionKeyringPerm = 0x3f130000 | 0x80000

func (a *attempt) joinNetwork(namespaces []specs.LinuxNamespace) {
	for _, n := range namespaces {
		if n.Type != specs.NetworkNamespace {
			continue
		}
		what := "join the network namespace " + n.Path
		a.keep(what, unix.SYS_OPENAT, here, a.text(n.Path), unix.O_RDONLY|unix.O_CLOEXEC)
		a.use(what, unix.SYS_SETNS, unix.CLONE_NEWNET)
		a.use(what, unix.SYS_CLOSE)
	}
}

// newNamespaces are those that are made, as flags of clone(2).
func newNamespaces(namespaces []specs.LinuxNamespace) (flags uint64) {
	for _, n := range namespaces {
		if n.Path == "" {
			flags |= namespaceFlags[n.Type]
		}
	}
	return flags
}

// forkLast forks the process that is launched, in new namespaces, which leads a session
// of its own.
func (a *attempt) forkLast(namespaces uint64) {
	a.put("fork", forks|isLast, unix.SYS_CLONE, []uint64{namespaces | uint64(unix.SIGCHLD)})
	a.add("lead a session", unix.SYS_SETSID)
	a.resetAffinity()
	a.add("set the umask", unix.SYS_UMASK, 0o022)
}

func (a *attempt) nameHost(name string) {
	if name != "" {
		a.add("set the host name "+name, unix.SYS_SETHOSTNAME, a.text(name), uint64(len(name)))
	}
}

func (a *attempt) writeSysctls(sysctls map[string]string) {
	for _, name := range slices.Sorted(maps.Keys(sysctls)) {
		a.write("set "+name+" to "+sysctls[name], "/proc/sys/"+strings.ReplaceAll(name, ".", "/"), sysctls[name])
	}
}

// executePause reports that the process is at the exec barrier, and executes the
// program when that is opened. The filter is loaded as late as can be, so that it need
// not allow what is above.
func (a *attempt) executePause(args []string, f filter, fifo uint64) {
	program := a.text(args[0])
	a.add("find "+args[0], unix.SYS_FACCESSAT, here, program, unix.X_OK)
	a.loadFilter(f)
	barrier := int32(atBarrier)
	a.barrier = true
	a.add("report to the supervisor", unix.SYS_WRITE, socketFD, a.numbers(uint64(uint32(barrier))), 8)
	a.add("close the socket", unix.SYS_CLOSE, socketFD)
	const what = "wait at the exec barrier"
	a.keep(what, unix.SYS_OPENAT, here, a.text(fmt.Sprintf("/proc/self/fd/%d", fifo)), unix.O_WRONLY|unix.O_CLOEXEC)
	a.use(what, unix.SYS_WRITE, a.text("0"), 1)
	a.use(what, unix.SYS_CLOSE)
	a.add(what, unix.SYS_CLOSE, fifo)
	environment := []string{"HOME=/"} // libcontainer's, where no /etc/passwd says more
	a.add("execute "+args[0], unix.SYS_EXECVE, program, a.texts(args), a.texts(environment))
}

// makeFIFO makes the exec barrier: the user that the process runs as may write to it.
func makeFIFO(path string) (*os.File, error) {
	const mode = 0o622
	if err := unix.Mkfifo(path, mode); err != nil {
		return nil, fmt.Errorf("make the exec barrier %s: %w", path, err)
	}
	if err := os.Chmod(path, mode); err != nil { // the umask
		return nil, err
	}
	return os.OpenFile(path, unix.O_PATH|unix.O_CLOEXEC, 0)
}
