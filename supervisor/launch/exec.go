package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// Exec is a further process of a container.
type Exec struct {
	ID      string           // of the container
	Init    *process.Process // the container's first
	Spec    *specs.Spec      // the container's
	Process *specs.Process   // what to execute
	// Streams become the user's of the process. Without a stdin it has one that is at its
	// end; without an output it has the container's /dev/null.
	Streams [3]*os.File
	Cgroups map[string]string // in which the process is born, by controller, "" for version 2
}

// Exec returns when the program is executed. After an error nothing of it runs, or what
// does ends when it can. errdefs.ErrFailedPrecondition says that the process asks for what
// the container does not have; where ctx has ended, its cause is in the chain.
func (l *Launcher) Exec(ctx context.Context, e Exec) (*Launched, error) {
	a, err := l.newAttempt(e.Streams)
	if err != nil {
		return nil, fmt.Errorf("launch a command in container %s: %w", e.ID, err)
	}
	defer a.close()
	made, err := a.exec(ctx, e)
	if err != nil {
		return nil, fmt.Errorf("launch a command in container %s: %w", e.ID, err)
	}
	return made, nil
}

func (a *attempt) exec(ctx context.Context, e Exec) (*Launched, error) {
	for _, stream := range e.Streams {
		if err := giveTo(stream, e.Process.User.UID); err != nil {
			return nil, err
		}
	}
	if err := a.fillExec(e); err != nil {
		return nil, err
	}
	if _, err := a.fork(); err != nil {
		return nil, err
	}
	return a.run(ctx)
}

// giveTo gives a stream to the user of the process, who can then open it by its
// name in /proc/self/fd. /dev/null, which may be the node's, stays as it is, and so does
// what cannot be given, as with libcontainer (fixStdioPermissions).
func giveTo(stream *os.File, uid uint32) error {
	if stream == nil {
		return nil
	}
	var stat unix.Stat_t
	if err := unix.Fstat(int(stream.Fd()), &stat); err != nil {
		return fmt.Errorf("owner of the streams: %w", err)
	}
	null := stat.Mode&unix.S_IFMT == unix.S_IFCHR && stat.Rdev == unix.Mkdev(1, 3)
	if stat.Uid == uid || null {
		return nil
	}
	err := unix.Fchown(int(stream.Fd()), int(uid), -1)
	if err != nil && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EROFS) {
		return fmt.Errorf("owner of the streams: %w", err)
	}
	return nil
}

// fillExec adds all calls: the same that libcontainer's init makes for an exec
// (setns_init_linux.go). What needs the node is done first, then all is joined, and all
// that is the node's closed: the process that is forked then, which the container sees,
// has nothing of it.
func (a *attempt) fillExec(e Exec) error {
	p := *e.Process
	inherit(&p, e.Spec.Process)
	filter, err := a.launcher.filters.of(e.Spec.Linux.Seccomp)
	if err != nil {
		return err
	}
	environment, err := environmentOf(&p)
	if err != nil {
		return err
	}
	init, err := a.give(e.Init.Pidfd())
	if err != nil {
		return err
	}
	a.add("close the program", unix.SYS_CLOSE, programFD)
	a.setOOMScoreAdj(p.OOMScoreAdj)
	a.confine(&p)
	// What runs in the container must not trace this process (CVE-2016-9962).
	a.add("refuse to be traced", unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0)
	if err := a.enterCgroups(e.Cgroups); err != nil {
		return err
	}
	a.add("join the namespaces of the container", unix.SYS_SETNS, init, allNamespaces(e.Spec.Linux.Namespaces))
	a.add("close what is of the node", unix.SYS_CLOSE_RANGE, programFD, ^uint64(0)>>32, 0)
	a.forkLast(0)
	a.add("close the socket with the exec", unix.SYS_FCNTL, socketFD, unix.F_SETFD, unix.FD_CLOEXEC)
	a.joinKeyring(e.ID)
	return a.become(&p, e.Streams, filter, environment)
}

// inherit gives an exec what it does not have of its own of the container.
func inherit(p, container *specs.Process) {
	if container == nil {
		return
	}
	if p.Capabilities == nil {
		p.Capabilities = container.Capabilities
	}
	if len(p.Rlimits) == 0 {
		p.Rlimits = container.Rlimits
	}
	if p.OOMScoreAdj == nil {
		p.OOMScoreAdj = container.OOMScoreAdj
	}
	if p.SelinuxLabel == "" {
		p.SelinuxLabel = container.SelinuxLabel
	}
	p.User.Umask = container.User.Umask
}

// confine says under which labels the program is to be executed, in the node's /proc: a
// container can have put something else over its own (CVE-2019-16884, CVE-2025-52881).
// What is forked inherits it.
func (a *attempt) confine(p *specs.Process) {
	if p.SelinuxLabel != "" && selinux.GetEnabled() {
		a.tryWrite("label the session keyring", "/proc/self/attr/keycreate", p.SelinuxLabel)
		a.write("set the SELinux label "+p.SelinuxLabel, "/proc/self/attr/exec", p.SelinuxLabel)
	}
	if p.ApparmorProfile == "" {
		return
	}
	file := "/proc/self/attr/apparmor/exec"
	if _, err := os.Stat(file); err != nil {
		file = "/proc/self/attr/exec" // before Linux 5.8
	}
	a.write("set the AppArmor profile "+p.ApparmorProfile, file, "exec "+p.ApparmorProfile)
}

// namespaceFlags are those of setns(2) and clone(2).
var namespaceFlags = map[specs.LinuxNamespaceType]uint64{
	specs.MountNamespace: unix.CLONE_NEWNS, specs.UTSNamespace: unix.CLONE_NEWUTS, specs.IPCNamespace: unix.CLONE_NEWIPC,
	specs.NetworkNamespace: unix.CLONE_NEWNET, specs.PIDNamespace: unix.CLONE_NEWPID, specs.CgroupNamespace: unix.CLONE_NEWCGROUP,
}

// allNamespaces are those that a container does not share with the node.
func allNamespaces(namespaces []specs.LinuxNamespace) (flags uint64) {
	for _, n := range namespaces {
		flags |= namespaceFlags[n.Type]
	}
	return flags
}

// become makes the process what it is to be, in the container. Without no_new_privs a
// filter can only be loaded by who may do so, before the privileges are dropped, and has
// to allow what drops them; else it is loaded last.
func (a *attempt) become(p *specs.Process, streams [3]*os.File, f filter, environment []string) error {
	if p.NoNewPrivileges {
		a.add("set no_new_privs", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1)
	}
	if p.User.Umask != nil {
		a.add("set the umask", unix.SYS_UMASK, uint64(*p.User.Umask))
	}
	if err := a.setLimits(p.Rlimits); err != nil {
		return err
	}
	a.enterDirectory(p.Cwd)
	if !p.NoNewPrivileges {
		a.loadFilter(f)
		f = filter{}
	}
	if err := a.becomeUser(p.User, p.Capabilities); err != nil {
		return err
	}
	a.enterDirectoryAsUser(p.Cwd)
	a.openNull(streams)
	a.execute(p.Args, environment, f)
	return nil
}

func (a *attempt) setLimits(limits []specs.POSIXRlimit) error {
	for _, limit := range limits {
		kind, ok := Rlimits[limit.Type]
		if !ok {
			return fmt.Errorf("unknown limit %q", limit.Type)
		}
		a.add("set "+limit.Type, unix.SYS_PRLIMIT64, 0, kind, a.numbers(limit.Soft, limit.Hard))
	}
	return nil
}

// Rlimits are limits by their names in getrlimit(2).
var Rlimits = map[string]uint64{
	"RLIMIT_AS": unix.RLIMIT_AS, "RLIMIT_CORE": unix.RLIMIT_CORE, "RLIMIT_CPU": unix.RLIMIT_CPU, "RLIMIT_DATA": unix.RLIMIT_DATA,
	"RLIMIT_FSIZE": unix.RLIMIT_FSIZE, "RLIMIT_LOCKS": unix.RLIMIT_LOCKS, "RLIMIT_MEMLOCK": unix.RLIMIT_MEMLOCK,
	"RLIMIT_MSGQUEUE": unix.RLIMIT_MSGQUEUE, "RLIMIT_NICE": unix.RLIMIT_NICE, "RLIMIT_NOFILE": unix.RLIMIT_NOFILE,
	"RLIMIT_NPROC": unix.RLIMIT_NPROC, "RLIMIT_RSS": unix.RLIMIT_RSS, "RLIMIT_RTPRIO": unix.RLIMIT_RTPRIO,
	"RLIMIT_RTTIME": unix.RLIMIT_RTTIME, "RLIMIT_SIGPENDING": unix.RLIMIT_SIGPENDING, "RLIMIT_STACK": unix.RLIMIT_STACK,
}

// enterDirectory enters the working directory before the process is the user's, who may
// not be able to. It follows no link of /proc/PID, which can lead out of the container
// (CVE-2024-21626): libcontainer's init does, and checks where it is then.
//
// What is kept is 0 where that has succeeded, which is a descriptor that is open, or the
// error.
func (a *attempt) enterDirectory(dir string) {
	if dir == "" {
		return
	}
	what, open := a.openDirectory(dir)
	a.put(what, mayFail|keep, unix.SYS_OPENAT2, open)
	a.put(what, mayFail|keep|firstKept, unix.SYS_FCHDIR, nil)
}

// enterDirectoryAsUser enters it, if only the user can: the server of a mount may not
// know the root of this node.
func (a *attempt) enterDirectoryAsUser(dir string) {
	if dir == "" {
		return
	}
	what, open := a.openDirectory(dir)
	const calls = 2
	a.put(what, mayFail|afterSuccess|firstKept|calls<<skipShift, unix.SYS_FCNTL, []uint64{0, unix.F_GETFD})
	a.keep(what, unix.SYS_OPENAT2, open...)
	a.use(what, unix.SYS_FCHDIR)
}

// openDirectory is the call that opens the working directory, whose descriptor is closed
// with the exec.
func (a *attempt) openDirectory(dir string) (what string, args []uint64) {
	how := a.numbers(unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0, unix.RESOLVE_NO_MAGICLINKS)
	return fmt.Sprintf("chdir to cwd (%q) set in config.json failed", dir), []uint64{here, a.text(dir), how, 3 * 8}
}

// openNull opens the container's /dev/null as outputs that are not given. That of the
// node would be the container's to change. It is opened with the rights of the program,
// whatever the container has put there.
func (a *attempt) openNull(streams [3]*os.File) {
	for number := uint64(1); number <= 2; number++ {
		if streams[number] != nil {
			continue
		}
		const what = "open /dev/null"
		a.keep(what, unix.SYS_OPENAT, here, a.text("/dev/null"), unix.O_WRONLY|unix.O_NONBLOCK|unix.O_NOCTTY|unix.O_CLOEXEC)
		a.use(what, unix.SYS_DUP3, number, 0)
	}
}

// execute looks for the program as execvp(3) does, but not in the working directory, and
// loads the filter when it is found. Where nothing is found, the list ends.
func (a *attempt) execute(args, environment []string, f filter) {
	name := args[0]
	program := fmt.Sprintf("exec: %q", name)
	argv, envp := a.texts(args), a.texts(environment)
	calls := 1 // for a program that is found
	if f.program != nil {
		calls++
	}
	found := func(place uint64, what string) {
		a.loadFilter(f)
		a.add(what, unix.SYS_EXECVE, place, argv, envp)
	}
	if strings.Contains(name, "/") {
		place := a.text(name)
		a.end = program + ": is a directory"
		a.add(program+": stat "+name, unix.SYS_FACCESSAT, here, place, unix.F_OK)
		a.unless(calls+1, program, unix.SYS_OPENAT, here, place, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC)
		a.add(program, unix.SYS_FACCESSAT, here, place, unix.X_OK)
		found(place, "exec "+name)
		return
	}
	a.end = program + ": executable file not found in $PATH"
	for _, dir := range strings.Split(valueOf(environment, "PATH"), ":") {
		if !path.IsAbs(dir) {
			continue
		}
		file := path.Join(dir, name)
		place := a.text(file)
		a.unless(calls+1, program, unix.SYS_OPENAT, here, place, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC)
		a.needs(calls, program, unix.SYS_FACCESSAT, here, place, unix.X_OK)
		found(place, "exec "+file)
	}
}

// environmentOf has each variable once, as it was given last (prepareEnv of
// libcontainer).
func environmentOf(p *specs.Process) ([]string, error) {
	var environment []string
	seen := make(map[string]bool)
	for _, variable := range slices.Backward(p.Env) {
		name, value, found := strings.Cut(variable, "=")
		if !found || name == "" || strings.IndexByte(variable, 0) >= 0 {
			return nil, fmt.Errorf("variable %q of the environment has no name, no value, or a NUL in it: %w", name, errdefs.ErrInvalidArgument)
		}
		if !seen[name] && (name != "HOME" || value != "") {
			environment = append(environment, variable)
		}
		seen[name] = true
	}
	slices.Reverse(environment)
	return environment, nil
}

// valueOf is the value of a variable, the last one of its name.
func valueOf(env []string, name string) string {
	for _, variable := range slices.Backward(env) {
		if value, ok := strings.CutPrefix(variable, name+"="); ok {
			return value
		}
	}
	return ""
}
