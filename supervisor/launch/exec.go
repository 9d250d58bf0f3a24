package launch

import (
	"context"
	"fmt"
	"maps"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// CanExec reports whether a launch can start a process of a container; else
// libcontainer does, in a starter. A terminal is made in the container, and where nothing
// says HOME its /etc/passwd is read there.
func CanExec(spec *specs.Spec, p *specs.Process) bool {
	return len(p.Args) > 0 && !p.Terminal && p.Capabilities != nil && p.Scheduler == nil && p.IOPriority == nil && p.ExecCPUAffinity == nil &&
		spec.Linux.Personality == nil && spec.Linux.MemoryPolicy == nil && spec.Linux.IntelRdt == nil &&
		hasOwnMounts(spec.Linux.Namespaces) && valueOf(p.Env, "HOME") != "" && !asksAnother(spec.Linux.Seccomp)
}

// hasOwnMounts reports whether there is a mount namespace, and none of a kind that a
// launch does not know.
func hasOwnMounts(namespaces []specs.LinuxNamespace) (mounts bool) {
	for _, n := range namespaces {
		if namespaceFlags[n.Type] == 0 {
			return false
		}
		mounts = mounts || n.Type == specs.MountNamespace
	}
	return mounts
}

// asksAnother reports whether another process decides on calls, which needs a descriptor
// of the filter.
func asksAnother(profile *specs.LinuxSeccomp) bool {
	return profile != nil && (profile.DefaultAction == specs.ActNotify || profile.ListenerPath != "" ||
		slices.ContainsFunc(profile.Syscalls, func(call specs.LinuxSyscall) bool { return call.Action == specs.ActNotify }))
}

// Exec is a further process of a container.
type Exec struct {
	ID      string            // of the container
	Init    *process.Process  // the container's first
	Spec    *specs.Spec       // the container's
	Process *specs.Process    // what to execute: the container's own, but for its arguments
	Streams [3]*os.File       // nobody else's: they become the user's of the process
	Cgroups map[string]string // in which the process is born, by controller, "" for version 2
}

// Exec returns when the program is executed. After an error nothing of it runs, or what
// does ends when it can. errdefs.ErrFailedPrecondition says that the process asks for what
// the container does not have; where ctx has ended, its cause is in the chain.
func (l *Launcher) Exec(ctx context.Context, e Exec) (made *Launched, err error) {
	a, err := l.newAttempt(e.Streams)
	if err == nil {
		err = a.exec(ctx, e)
		made = a.made
		a.end(err)
	}
	if err != nil {
		return nil, fmt.Errorf("launch a command in container %s: %w", e.ID, err)
	}
	return made, nil
}

func (a *attempt) exec(ctx context.Context, e Exec) error {
	for _, stream := range e.Streams {
		// So that the user can open it again, by its name in /proc/self/fd.
		if err := stream.Chown(int(e.Process.User.UID), -1); err != nil {
			return fmt.Errorf("owner of the streams: %w", err)
		}
	}
	if err := a.fillExec(e); err != nil {
		return err
	}
	if _, err := a.fork(); err != nil {
		return err
	}
	return a.run(ctx)
}

// fillExec adds all calls: the same that libcontainer's init makes for an exec
// (setns_init_linux.go). What needs the node is done first, then all is joined, and all
// that is the node's closed: the process that is forked then, which the container sees,
// has nothing of it.
func (a *attempt) fillExec(e Exec) error {
	filter, err := a.launcher.filters.of(e.Spec.Linux.Seccomp)
	if err != nil {
		return err
	}
	init, err := a.give(e.Init.Pidfd())
	if err != nil {
		return err
	}
	a.add("close the program", unix.SYS_CLOSE, programFD)
	a.setOOMScoreAdj(e.Process.OOMScoreAdj)
	a.confine(e.Process)
	// What runs in the container must not trace this process (CVE-2016-9962).
	a.add("refuse to be traced", unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0)
	if err := a.enterCgroups(e.Cgroups); err != nil {
		return err
	}
	var all uint64 // the namespaces that the container does not share with the node
	for _, n := range e.Spec.Linux.Namespaces {
		all |= namespaceFlags[n.Type]
	}
	a.add("join the namespaces of the container", unix.SYS_SETNS, init, all)
	a.add("close what is of the node", unix.SYS_CLOSE_RANGE, programFD, ^uint64(0)>>32, 0)
	a.forkLast(0)
	a.add("close the socket with the exec", unix.SYS_FCNTL, socketFD, unix.F_SETFD, unix.FD_CLOEXEC)
	a.joinKeyring(e.ID)
	return a.become(e.Process, filter)
}

// enterCgroups brings what goes on with the list into cgroups, by controller. The whole
// kernel has a lock for processes that are moved (cgroup_procs_write_start of
// kernel/cgroup/cgroup.c), for which others wait some milliseconds; on version 1 a
// single thread that moves itself needs none of it, on version 2 a process that is born
// in its cgroup does not.
func (a *attempt) enterCgroups(cgroups map[string]string) error {
	for _, controller := range slices.Sorted(maps.Keys(cgroups)) {
		if controller != "" {
			a.write("enter the cgroup "+cgroups[controller], cgroups[controller]+"/tasks", "0")
		}
	}
	unified, ok := cgroups[""]
	if !ok {
		return nil
	}
	dir, err := a.give(os.OpenFile(unified, unix.O_PATH|unix.O_DIRECTORY, 0))
	if err != nil {
		return err
	}
	// struct clone_args: flags, pidfd, child_tid, parent_tid, exit_signal, stack, stack_size,
	// tls, set_tid, set_tid_size, cgroup.
	args := a.numbers(unix.CLONE_INTO_CGROUP, 0, 0, 0, uint64(unix.SIGCHLD), 0, 0, 0, 0, 0, dir)
	a.put("enter the cgroup "+unified, forks, unix.SYS_CLONE3, args, 11*8)
	return nil
}

// confine says under which labels the program is to be executed, in the node's /proc: a
// container can have put something else over its own (CVE-2019-16884, CVE-2025-52881).
// What is forked inherits it.
func (a *attempt) confine(p *specs.Process) {
	if p.SelinuxLabel != "" && selinux.GetEnabled() {
		a.tryWrite("label the session keyring", "/proc/self/attr/keycreate", p.SelinuxLabel)
		a.write("set the SELinux label "+p.SelinuxLabel, "/proc/self/attr/exec", p.SelinuxLabel)
	}
	if p.ApparmorProfile != "" {
		a.write("set the AppArmor profile "+p.ApparmorProfile, "/proc/self/attr/apparmor/exec", "exec "+p.ApparmorProfile)
	}
}

// namespaceFlags are those of setns(2) and clone(2).
var namespaceFlags = map[specs.LinuxNamespaceType]uint64{
	specs.MountNamespace: unix.CLONE_NEWNS, specs.UTSNamespace: unix.CLONE_NEWUTS, specs.IPCNamespace: unix.CLONE_NEWIPC,
	specs.NetworkNamespace: unix.CLONE_NEWNET, specs.PIDNamespace: unix.CLONE_NEWPID, specs.CgroupNamespace: unix.CLONE_NEWCGROUP,
}

// become makes the process what it is to be, in the container. Without no_new_privs a
// filter can only be loaded by who may do so, before the privileges are dropped, and has
// to allow what drops them; else it is loaded last.
func (a *attempt) become(p *specs.Process, f filter) error {
	if p.NoNewPrivileges {
		a.add("set no_new_privs", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1)
	}
	if p.User.Umask != nil {
		a.add("set the umask", unix.SYS_UMASK, uint64(*p.User.Umask))
	}
	for _, limit := range p.Rlimits {
		kind, ok := Rlimits[limit.Type]
		if !ok {
			return fmt.Errorf("unknown limit %q", limit.Type)
		}
		a.add("set "+limit.Type, unix.SYS_PRLIMIT64, 0, kind, a.numbers(limit.Soft, limit.Hard))
	}
	// The working directory is entered before the process is the user's, who may not be able to, and
	// after that if only the user can: the server of a mount may not know the root of this node. No
	// link of /proc/PID is followed, which can lead out of the container (CVE-2024-21626):
	// libcontainer's init does, and checks where it is then.
	chdir := fmt.Sprintf("chdir to cwd (%q) set in config.json failed", p.Cwd)
	how := a.numbers(unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0, unix.RESOLVE_NO_MAGICLINKS)
	open := []uint64{here, a.text(p.Cwd), how, 3 * 8}
	a.put(chdir, mayFail|keep, unix.SYS_OPENAT2, open...)
	a.put(chdir, mayFail|keep|firstKept, unix.SYS_FCHDIR) // keeps 0, which is a descriptor that is open, or the error
	if !p.NoNewPrivileges {
		a.loadFilter(f)
		f = filter{}
	}
	if err := a.becomeUser(p.User, p.Capabilities); err != nil {
		return err
	}
	const otherwise = 2 // calls
	a.put(chdir, mayFail|firstKept|otherwise<<skipShift, unix.SYS_FCNTL, 0, unix.F_GETFD)
	a.keep(chdir, unix.SYS_OPENAT2, open...)
	a.use(chdir, unix.SYS_FCHDIR)
	a.execute(p.Args, p.Env, f)
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

// execute executes the program, which it looks for as execvp(3) does, but not in the working
// directory. Where nothing is found, the list ends.
func (a *attempt) execute(args, env []string, f filter) {
	// The user's home is in another entry: see CanExec.
	env = slices.DeleteFunc(slices.Clone(env), func(variable string) bool { return variable == "HOME=" })
	argv, envp := a.texts(args), a.texts(env)
	program := fmt.Sprintf("exec: %q", args[0])
	a.loadFilter(f)
	if strings.Contains(args[0], "/") {
		a.add(program, unix.SYS_EXECVE, a.text(args[0]), argv, envp)
		return
	}
	for dir := range strings.SplitSeq(valueOf(env, "PATH"), ":") {
		if path.IsAbs(dir) {
			a.put(program, mayMiss, unix.SYS_EXECVE, a.text(path.Join(dir, args[0])), argv, envp)
		}
	}
	a.missing = program + ": executable file not found in $PATH"
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
