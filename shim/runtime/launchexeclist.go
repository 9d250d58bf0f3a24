package runtime

import (
	"encoding/binary"
	"path"
	"slices"
	"strings"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/shim/runtime/launch"
)

// execInit is the descriptor of the container's first process.
const execInit = launch.Socket + 1

// execList collects what an exec does: the same that libcontainer's init does for
// one, in the same order (setns_init_linux.go).
type execList struct {
	launchList
	environment []string
}

// fill adds all calls, up to the exec of the first program that PATH leads to.
func (l *execList) fill() error {
	l.Add("close what is not its own", unix.SYS_CLOSE_RANGE, launchProgram, ^uint64(0)>>32, 0)
	l.Add("close the socket with the exec", unix.SYS_FCNTL, launch.Socket, unix.F_SETFD, unix.FD_CLOEXEC)
	l.setOOMScoreAdj()
	l.enterCgroups()
	// What runs in the container must not trace this process (CVE-2016-9962).
	l.Add("refuse to be traced", unix.SYS_PRCTL, unix.PR_SET_DUMPABLE, 0)
	l.Add("join the namespaces", unix.SYS_SETNS, execInit, namespacesOf(l.config.Namespaces))
	l.Add("close the first process", unix.SYS_CLOSE, execInit)
	if !l.config.NoNewKeyring {
		l.Add("join the session keyring", unix.SYS_KEYCTL, unix.KEYCTL_JOIN_SESSION_KEYRING, l.String("_ses."+l.id))
	}
	if noNewPrivileges(l.config, l.process) {
		l.Add("set no_new_privs", unix.SYS_PRCTL, unix.PR_SET_NO_NEW_PRIVS, 1)
	}
	l.setLimits()
	l.enterDirectory()
	if err := l.becomeUser(); err != nil {
		return err
	}
	l.executeFirst()
	return nil
}

// namespacesOf are those to join, but for that of pids: the process is born there.
func namespacesOf(namespaces configs.Namespaces) (flags uint64) {
	for _, n := range namespaces {
		if n.Type != configs.NEWPID {
			flags |= uint64(n.Syscall())
		}
	}
	return flags
}

func (l *execList) setLimits() {
	limits := l.config.Rlimits
	if len(l.process.Rlimits) > 0 {
		limits = l.process.Rlimits
	}
	for _, limit := range limits {
		value := binary.NativeEndian.AppendUint64(nil, limit.Soft)
		value = binary.NativeEndian.AppendUint64(value, limit.Hard)
		l.Add("set a resource limit", unix.SYS_PRLIMIT64, 0, uint64(limit.Type), l.Bytes(value))
	}
}

// enterDirectory follows no link of /proc/PID, which can lead out of the container
// (CVE-2024-21626): libcontainer's init does, and checks where it is then.
func (l *execList) enterDirectory() {
	if l.process.Cwd == "" {
		return
	}
	how := binary.NativeEndian.AppendUint64(nil, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC)
	how = binary.NativeEndian.AppendUint64(how, 0)
	how = binary.NativeEndian.AppendUint64(how, unix.RESOLVE_NO_MAGICLINKS)
	l.Keep("open "+l.process.Cwd, unix.SYS_OPENAT2, here, l.String(l.process.Cwd), l.Bytes(how), uint64(len(how)))
	l.Use("enter "+l.process.Cwd, unix.SYS_FCHDIR)
	l.Use("close "+l.process.Cwd, unix.SYS_CLOSE)
}

// becomeUser leaves the capabilities that the process is to have.
func (l *execList) becomeUser() error {
	last, err := capability.LastCap()
	if err != nil {
		return err
	}
	caps := l.process.Capabilities
	bounding := capSet(caps.Bounding, last)
	for c := range last + 1 {
		if bounding&(1<<c) == 0 {
			l.Add("drop "+c.String()+" for good", unix.SYS_PRCTL, unix.PR_CAPBSET_DROP, uint64(c))
		}
	}
	l.Add("keep capabilities", unix.SYS_PRCTL, unix.PR_SET_KEEPCAPS, 1)
	l.setUser()
	l.Add("keep capabilities no longer", unix.SYS_PRCTL, unix.PR_SET_KEEPCAPS, 0)
	effective, permitted, inheritable := capSet(caps.Effective, last), capSet(caps.Permitted, last), capSet(caps.Inheritable, last)
	var data []byte // struct __user_cap_data_struct, low halves first (capset(2))
	for _, shift := range []int{0, 32} {
		for _, set := range []uint64{effective, permitted, inheritable} {
			data = binary.NativeEndian.AppendUint32(data, uint32(set>>shift))
		}
	}
	l.Add("set the capabilities", unix.SYS_CAPSET, l.capHeader(), l.Bytes(data))
	l.Add("drop the ambient capabilities", unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_CLEAR_ALL)
	ambient := capSet(caps.Ambient, last)
	for c := range last + 1 {
		if ambient&(1<<c) != 0 {
			l.Try("raise "+c.String(), unix.SYS_PRCTL, unix.PR_CAP_AMBIENT, unix.PR_CAP_AMBIENT_RAISE, uint64(c))
		}
	}
	return nil
}

// capSet is a set of capabilities by their names; those that this kernel does not
// have are left out.
func capSet(names []string, last capability.Cap) (set uint64) {
	for c := range last + 1 {
		if slices.Contains(names, "CAP_"+strings.ToUpper(c.String())) {
			set |= 1 << c
		}
	}
	return set
}

// executeFirst looks for the program as execvp(3) does, and loads the filter when it
// is found. Where nothing is found, or what is found cannot be executed, the list
// ends.
func (l *execList) executeFirst() {
	name := l.process.Args[0]
	places := []string{name}
	if !strings.Contains(name, "/") {
		places = places[:0]
		for _, dir := range strings.Split(valueOf(l.environment, "PATH"), ":") {
			places = append(places, path.Join(dir, name))
		}
	}
	then := 1 // calls for a program that is found
	if l.filter != nil {
		then++
	}
	args, environment := l.Strings(l.process.Args), l.Strings(l.environment)
	for _, place := range places {
		program := l.String(place)
		l.If(then, "find "+place, unix.SYS_FACCESSAT, here, program, unix.X_OK)
		l.loadFilter()
		l.Add("execute "+place, unix.SYS_EXECVE, program, args, environment)
	}
}
