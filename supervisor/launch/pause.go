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
	"sync"

	"github.com/moby/sys/userns"
	"github.com/opencontainers/cgroups"
	_ "github.com/opencontainers/cgroups/devices" // without it no rules of devices can be set
	devices "github.com/opencontainers/cgroups/devices/config"
	"github.com/opencontainers/cgroups/manager"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// CanPause reports whether a launch can start a pause: one of oci.ForSandbox's, without labels. In a user namespace
// some options of mounts must stay (mount_namespaces(7), "Restrictions on mount namespaces").
func CanPause(spec *specs.Spec) bool {
	for _, m := range spec.Mounts {
		if options, known := pauseMounts[m.Type]; !known || !slices.Equal(m.Options, options) {
			return false
		}
	}
	p := spec.Process
	return !userns.RunningInUserNS() && hasOwnMounts(spec.Linux.Namespaces) && spec.Root.Readonly && p.NoNewPrivileges &&
		p.Capabilities != nil && len(p.Args) > 0 && pauseFields.cover(spec) && !asksAnother(spec.Linux.Seccomp)
}

// pauseMounts are the options of a pause's mounts, by type; mountFlags are those that both have.
var pauseMounts = map[string][]string{
	"proc": {"nosuid", "noexec", "nodev"},
	"bind": {"bind", "ro", "nosuid", "noexec", "nodev"},
}

const mountFlags = unix.MS_NOSUID | unix.MS_NODEV | unix.MS_NOEXEC

// Pause is a pod's pause to launch.
type Pause struct {
	ID     string
	Dir    string // gets the exec barrier, FIFOFile
	Spec   *specs.Spec
	Cgroup *cgroups.Cgroup // nil if the spec names none of its own, which is refused
}

// FIFOFile is the name of the exec barrier, as in libcontainer: to read from it starts the program.
const FIFOFile = "exec.fifo"

// Pause brings a pause to the exec barrier. After an error all processes are killed, and end when they can.
// The caller removes the cgroups, and what is in Dir.
func (l *Launcher) Pause(ctx context.Context, p Pause) (*Launched, error) {
	return l.launch(p.Spec.Process.Args[0], [3]*os.File{}, func(a *attempt) error { return a.pause(ctx, p) })
}

// pause makes the cgroups and the process. systemd makes a cgroup only for a process: it gets the first one, whose
// children are born there.
func (a *attempt) pause(ctx context.Context, p Pause) error {
	m, r, err := pauseCgroups(p)
	if err != nil {
		return fmt.Errorf("choose the cgroups of a pause: %w", err)
	}
	var enter map[string]string
	if !p.Cgroup.Systemd {
		if err := errors.Join(m.Apply(-1), m.Set(r)); err != nil { // without a process
			return fmt.Errorf("make the cgroups: %w", err)
		}
		enter = m.GetPaths()
	}
	if err := a.fillPause(p, enter); err != nil {
		return err
	}
	first, err := a.fork()
	if err != nil {
		return err
	}
	if p.Cgroup.Systemd {
		if err := errors.Join(m.Apply(first.PID), m.Set(r)); err != nil {
			return fmt.Errorf("make the cgroups: %w", err)
		}
	}
	if err := a.run(ctx); err != nil {
		return err
	}
	a.made.Cgroups = maps.Clone(m.GetPaths())
	return nil
}

// pauseCgroups returns the cgroups of a pause, and does not make them.
func pauseCgroups(p Pause) (cgroups.Manager, *cgroups.Resources, error) {
	c := p.Cgroup
	if c == nil {
		return nil, nil, fmt.Errorf("the cgroup %q is none of its own", p.Spec.Linux.CgroupsPath)
	}
	// As in libcontainer: all may be made; null, random, full, tty, zero, urandom, terminals, ptmx, tun used.
	var rules []*devices.Rule
	for _, kind := range []devices.Type{devices.CharDevice, devices.BlockDevice} {
		rules = append(rules, &devices.Rule{Type: kind, Major: devices.Wildcard, Minor: devices.Wildcard, Permissions: "m", Allow: true})
	}
	for _, number := range [][2]int64{{1, 3}, {1, 8}, {1, 7}, {5, 0}, {1, 5}, {1, 9}, {136, devices.Wildcard}, {5, 2}, {10, 200}} {
		rules = append(rules, &devices.Rule{Type: devices.CharDevice, Major: number[0], Minor: number[1], Permissions: "rwm", Allow: true})
	}
	c.Resources.Devices = rules
	if asked := p.Spec.Linux.Resources; asked != nil && asked.CPU != nil && asked.CPU.Shares != nil {
		c.Resources.CpuShares = *asked.CPU.Shares
		c.Resources.CpuWeight = cgroups.ConvertCPUSharesToCgroupV2Value(*asked.CPU.Shares)
	}
	m, err := manager.New(c)
	return m, c.Resources, err
}

// fillPause adds the calls that libcontainer's init makes for such a container (standard_init_linux.go).
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
	kept, err := a.launcher.mounts.get(spec)
	if err != nil {
		return err
	}
	a.files = append(a.files, kept)
	a.add("close the program", unix.SYS_CLOSE, programFD)
	a.setOOMScoreAdj(spec.Process.OOMScoreAdj)
	if err := a.enterCgroups(enter); err != nil {
		return err
	}
	a.joinNetwork(spec.Linux.Namespaces)
	a.add("join the mount namespace of pauses", unix.SYS_SETNS, fifo+1, unix.CLONE_NEWNS)
	var made uint64 // new namespaces
	for _, n := range spec.Linux.Namespaces {
		if n.Path == "" {
			made |= namespaceFlags[n.Type]
		}
	}
	a.forkLast(made)
	a.joinKeyring(p.ID, 1)
	a.put("skip what is the keyring's", 1<<skipShift, unix.SYS_GETPID)
	session := int64(unix.KEY_SPEC_SESSION_KEYRING)
	a.add("set the permissions of the session keyring", unix.SYS_KEYCTL, unix.KEYCTL_SETPERM, uint64(session), keyringPerm)
	a.add("close the mounts", unix.SYS_CLOSE_RANGE, fifo+1, ^uint64(0)>>32, 0)
	for _, m := range spec.Mounts {
		if m.Type == "proc" {
			a.add("mount proc on "+m.Destination, unix.SYS_MOUNT, a.text(m.Source), a.text(m.Destination), a.text(m.Type), mountFlags)
		}
	}
	if spec.Hostname != "" {
		a.add("set the host name "+spec.Hostname, unix.SYS_SETHOSTNAME, a.text(spec.Hostname), uint64(len(spec.Hostname)))
	}
	if name := spec.Domainname; name != "" {
		a.add("set the domain name "+name, unix.SYS_SETDOMAINNAME, a.text(name), uint64(len(name)))
	}
	for _, name := range slices.Sorted(maps.Keys(spec.Linux.Sysctl)) {
		value := spec.Linux.Sysctl[name]
		a.write("set "+name+" to "+value, "/proc/sys/"+strings.ReplaceAll(name, ".", "/"), value, 0)
	}
	a.add("set no_new_privs", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1)
	if err := a.becomeUser(spec.Process.User, spec.Process.Capabilities); err != nil {
		return err
	}
	a.executePause(spec.Process.Args, filter, fifo)
	return nil
}

func (a *attempt) joinNetwork(namespaces []specs.LinuxNamespace) {
	for _, n := range namespaces {
		if n.Type != specs.NetworkNamespace {
			continue
		}
		what := "join the network namespace " + n.Path
		a.put(what, keep, unix.SYS_OPENAT, here, a.text(n.Path), unix.O_RDONLY|unix.O_CLOEXEC)
		a.put(what, firstKept, unix.SYS_SETNS, 0, unix.CLONE_NEWNET)
		a.put(what, firstKept, unix.SYS_CLOSE)
	}
}

// executePause closes the socket, which reports the exec barrier, and executes the program once somebody
// reads from the barrier. The filter is loaded late, so that it need not allow the calls above.
func (a *attempt) executePause(args []string, f filter, fifo uint64) {
	program := a.text(args[0])
	a.add("find "+args[0], unix.SYS_FACCESSAT, here, program, unix.X_OK)
	a.loadFilter(f)
	a.barrier = true
	a.add("close the socket", unix.SYS_CLOSE, socketFD)
	const what = "wait at the exec barrier"
	a.put(what, keep, unix.SYS_OPENAT, here, a.text(fmt.Sprintf("/proc/self/fd/%d", fifo)), unix.O_WRONLY|unix.O_CLOEXEC)
	a.put(what, firstKept, unix.SYS_WRITE, 0, a.text("0"), 1)
	a.put(what, firstKept, unix.SYS_CLOSE)
	a.add(what, unix.SYS_CLOSE, fifo)
	environment := []string{"HOME=/"} // as libcontainer's without an /etc/passwd
	a.add("execute "+args[0], unix.SYS_EXECVE, program, a.texts(args), a.texts(environment))
}

// makeFIFO makes the exec barrier, to which the process's user may write.
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

// mounts is a mount namespace that has only the pauses' common root. Each pause gets a copy: a copy of the node's would
// have the mounts of all pods, which the pause would have to unmount again.
type mounts struct {
	mu        sync.Mutex
	namespace *os.File
	of        string // the root and the mounts
	root      os.FileInfo
}

// get returns the namespace for a pause, which is the same for all pauses of a node.
func (m *mounts) get(spec *specs.Spec) (*os.File, error) {
	m.mu.Lock()
	defer m.mu.Unlock()
	of := fmt.Sprint(spec.Root.Path, spec.Mounts)
	root, err := os.Stat(spec.Root.Path)
	if err != nil || m.of == of && os.SameFile(m.root, root) {
		return m.namespace, err
	}
	var made *os.File
	err = process.OnDisposableThread(func() (err error) {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		if made, err = os.Open("/proc/thread-self/ns/mnt"); err != nil {
			return err
		}
		return mountRoot(spec)
	})
	if err != nil {
		_ = made.Close()
		return nil, fmt.Errorf("make the mounts of pauses: %w", err)
	}
	m.namespace, m.of, m.root = made, of, root // an earlier one may be in use
	return made, nil
}

// mountRoot changes the root of this thread's mount namespace, and removes all other mounts.
func mountRoot(spec *specs.Spec) (err error) {
	do := func(what string, f func() error) {
		if err == nil {
			if err = f(); err != nil {
				err = fmt.Errorf("%s: %w", what, err)
			}
		}
	}
	bind := func(source, target string, flags uintptr) {
		do("bind "+source, func() error { return unix.Mount(source, target, "", unix.MS_BIND, "") })
		do("set the options of "+target, func() error { return unix.Mount("", target, "", unix.MS_BIND|unix.MS_REMOUNT|unix.MS_RDONLY|flags, "") })
	}
	do("make the mounts private", func() error { return unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "") })
	bind(spec.Root.Path, spec.Root.Path, 0)
	for _, m := range spec.Mounts {
		if m.Type == "bind" {
			bind(m.Source, spec.Root.Path+m.Destination, mountFlags)
		}
	}
	do("enter the root", func() error { return unix.Chdir(spec.Root.Path) })
	do("change the root", func() error { return unix.PivotRoot(".", ".") })
	do("unmount all others", func() error { return unix.Unmount(".", unix.MNT_DETACH) })
	return err
}
