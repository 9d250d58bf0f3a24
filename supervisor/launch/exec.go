package launch

import (
	"context"
	"fmt"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"github.com/opencontainers/selinux/go-selinux"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// CanExec reports whether a launch can start a process of a container. If not, libcontainer does in a starter: what
// needs code in the container, such as a terminal, or HOME from its /etc/passwd.
func CanExec(spec *specs.Spec, p *specs.Process) bool {
	return len(p.Args) > 0 && p.Capabilities != nil && processFields.cover(p) && containerFields.cover(spec.Linux) &&
		hasOwnMounts(spec.Linux.Namespaces) && valueOf(p.Env, "HOME") != "" && !asksAnother(spec.Linux.Seccomp)
}

// asksAnother reports whether another process decides on calls, and so needs a descriptor of the filter, or the profile
// has a field that compile does not implement.
func asksAnother(profile *specs.LinuxSeccomp) bool {
	return profile != nil && (profile.DefaultAction == specs.ActNotify || !filterFields.cover(profile) ||
		slices.ContainsFunc(profile.Syscalls, func(call specs.LinuxSyscall) bool { return call.Action == specs.ActNotify }))
}

// Template is what all execs of a container share.
type Template struct {
	spec   *specs.Spec // only what CanExec and openNamespaces read
	filter filter
}

// Template returns the template of a container. Its spec is not kept: seccomp profiles are large.
func (l *Launcher) Template(spec *specs.Spec) (*Template, error) {
	linux := *spec.Linux
	t := &Template{spec: &specs.Spec{Linux: &linux}}
	if asksAnother(linux.Seccomp) {
		return t, nil // no exec of it is launched
	}
	linux.Seccomp = nil
	var err error
	t.filter, err = l.filters.of(spec.Linux.Seccomp)
	return t, err
}

// CanExec is CanExec for a process of the container.
func (t *Template) CanExec(p *specs.Process) bool { return CanExec(t.spec, p) }

// Exec is a further process of a container.
type Exec struct {
	*Template
	ID      string                    // of the container
	Init    *process.Process          // the container's first
	Process *specs.Process            // what to execute: the container's own with other arguments
	Streams [3]*os.File               // not shared: the process's user becomes their owner
	Cgroups map[string]string         // of the process, by controller, "" for version 2
	Made    func(process.Facts) error // is called before the program is executed; nil for none
}

// Exec returns when the program is executed. After an error all processes are killed, and end when they can.
// errdefs.ErrFailedPrecondition says that the container lacks what the process asks for. The error of an ended ctx
// wraps its cause.
func (l *Launcher) Exec(ctx context.Context, e Exec) (*Launched, error) {
	return l.launch("a command", e.Streams, func(a *attempt) error {
		for _, stream := range e.Streams {
			// So that the user can open it again, by its name in /proc/self/fd.
			if err := stream.Chown(int(e.Process.User.UID), -1); err != nil {
				return fmt.Errorf("change the owner of the streams: %w", err)
			}
		}
		if err := a.fillExec(e); err != nil {
			return err
		}
		a.note = e.Made
		if _, err := a.fork(); err != nil {
			return err
		}
		return a.run(ctx)
	})
}

// fillExec adds the calls that libcontainer's init makes for an exec (setns_init_linux.go). First comes what
// needs the node. Then all namespaces are joined and the node's descriptors closed, so that the process that
// the container sees has none of them.
func (a *attempt) fillExec(e Exec) error {
	joins, err := a.openNamespaces(e)
	if err != nil {
		return err
	}
	a.add("close the program", unix.SYS_CLOSE, programFD)
	a.setOOMScoreAdj(e.Process.OOMScoreAdj)
	// Children inherit the labels. They are set in the node's /proc, as a container may have mounted something
	// over its own (CVE-2019-16884, CVE-2025-52881).
	if label := e.Process.SelinuxLabel; label != "" && selinux.GetEnabled() {
		a.write("label the session keyring", "/proc/self/attr/keycreate", label, mayFail)
		a.write("set the SELinux label "+label, "/proc/self/attr/exec", label, 0)
	}
	if profile := e.Process.ApparmorProfile; profile != "" {
		a.write("set the AppArmor profile "+profile, "/proc/self/attr/apparmor/exec", "exec "+profile, 0)
	}
	a.add("refuse to be traced", unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0) // by the container (CVE-2016-9962)
	if err := a.enterCgroups(e.Cgroups); err != nil {
		return err
	}
	for _, join := range joins {
		a.add("join the namespaces of the container", unix.SYS_SETNS, join.fd, join.kinds)
	}
	a.add("close what is of the node", unix.SYS_CLOSE_RANGE, programFD, ^uint64(0)>>32, 0)
	a.forkLast(0)
	a.add("close the socket with the exec", unix.SYS_FCNTL, socketFD, unix.F_SETFD, unix.FD_CLOEXEC)
	a.joinKeyring(e.ID, 0)
	return a.become(e.Process, e.filter)
}

// namespaces are a descriptor for setns(2) and the kinds to join by it.
type namespaces struct{ fd, kinds uint64 }

// openNamespaces opens the container's namespaces: all by the pidfd of the first process, or each by the file of another
// thread of it if its first thread, for which the pidfd stands, has ended.
func (a *attempt) openNamespaces(e Exec) (joins []namespaces, err error) {
	tid, err := process.LiveThread(e.Init.PID)
	if err != nil {
		return nil, fmt.Errorf("find the namespaces of the container: %w", err)
	}
	if tid == e.Init.PID {
		pidfd, err := a.give(e.Init.Pidfd())
		all := namespaces{fd: pidfd}
		for _, n := range e.spec.Linux.Namespaces {
			all.kinds |= namespaceFlags[n.Type]
		}
		return []namespaces{all}, err
	}
	for _, n := range e.spec.Linux.Namespaces {
		file, err := a.give(os.Open(fmt.Sprintf("/proc/%d/task/%d/ns/%s", e.Init.PID, tid, namespaceFiles[n.Type])))
		if err != nil {
			return nil, fmt.Errorf("open a namespace of the container: %w", err)
		}
		joins = append(joins, namespaces{file, namespaceFlags[n.Type]})
	}
	if e.Init.Ended() { // these may be another process's that got its pid
		return nil, os.ErrProcessDone
	}
	return joins, nil
}

// namespaceFiles are the names in /proc/PID/ns.
var namespaceFiles = map[specs.LinuxNamespaceType]string{
	specs.MountNamespace: "mnt", specs.UTSNamespace: "uts", specs.IPCNamespace: "ipc",
	specs.NetworkNamespace: "net", specs.PIDNamespace: "pid", specs.CgroupNamespace: "cgroup",
}

// become sets the process's attributes in the container. Without no_new_privs only a privileged process may
// load a filter, so it is loaded before the privileges are dropped, and has to allow that; else it is last.
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
	// The working directory is entered as root, or as the user if the server of a mount refuses root.
	// No link of /proc/PID is followed, as it can lead out of the container (CVE-2024-21626).
	chdir := fmt.Sprintf("chdir to cwd (%q) set in config.json failed", p.Cwd)
	how := a.numbers(unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0, unix.RESOLVE_NO_MAGICLINKS)
	open := []uint64{here, a.text(p.Cwd), how, 3 * 8}
	a.put(chdir, mayFail|keep, unix.SYS_OPENAT2, open...)
	a.put(chdir, mayFail|keep|firstKept, unix.SYS_FCHDIR) // keeps 0, an open descriptor, or the error
	if !p.NoNewPrivileges {
		a.loadFilter(f)
		f = filter{}
	}
	if err := a.becomeUser(p.User, p.Capabilities); err != nil {
		return err
	}
	const otherwise = 2 // calls
	a.put(chdir, mayFail|firstKept|otherwise<<skipShift, unix.SYS_FCNTL, 0, unix.F_GETFD)
	a.put(chdir, keep, unix.SYS_OPENAT2, open...)
	a.put(chdir, firstKept, unix.SYS_FCHDIR)
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

// execute finds the program as execvp(3) does, but not in the working directory, and executes it.
func (a *attempt) execute(args, env []string, f filter) {
	// Another entry has the home: see CanExec.
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

// valueOf returns the value of the last variable with a name.
func valueOf(env []string, name string) string {
	for _, variable := range slices.Backward(env) {
		if value, ok := strings.CutPrefix(variable, name+"="); ok {
			return value
		}
	}
	return ""
}
