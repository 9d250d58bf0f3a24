package runtime

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/moby/sys/user"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

// execNeedsInit says what of an exec only libcontainer's init can do, "" if a launch
// does all of it.
func execNeedsInit(config *configs.Config, p *libcontainer.Process, streams Streams) string {
	switch {
	case streams.Terminal:
		return "a terminal, which is made in the container"
	case len(p.ExtraFiles) > 0:
		return "further descriptors"
	case p.Scheduler != nil || p.IOPriority != nil || p.CPUAffinity != nil || config.ExecCPUAffinity != nil:
		return "priorities and processors"
	case config.Scheduler != nil || config.IOPriority != nil || config.MemoryPolicy != nil || config.Personality != nil || config.Umask != nil:
		return "settings of the process"
	case config.IntelRdt != nil || config.RootlessEUID || config.RootlessCgroups:
		return "resources besides cgroups, or no root"
	case p.Capabilities == nil || len(p.Args) == 0:
		return "capabilities or a program that are the container's"
	case config.Seccomp != nil && !noNewPrivileges(config, p):
		return "a filter that is loaded before the privileges are dropped"
	case !namesOnly(p.Env) || !absolute(valueOf(p.Env, "PATH")):
		return "an environment that is refused, or programs of the working directory"
	}
	for _, n := range config.Namespaces {
		if n.Type == configs.NEWUSER || n.Type == configs.NEWTIME {
			return "a namespace of type " + string(n.Type)
		}
	}
	if !config.Namespaces.Contains(configs.NEWNS) {
		return "the mount namespace of the node"
	}
	return initForTracers(config) + initForLabels(config, p) + initForSeccomp(config.Seccomp)
}

// initForTracers: a launched process is in the pid namespace of the container before
// it is in its mount namespace. Who may trace all processes there would get one that
// has the node's files (ptrace(2), "Ptrace access mode checking"); that of
// libcontainer's is cloned when it has joined all. In a joined pid namespace it may be
// another container that may; in the node's, it can trace the node's own processes.
func initForTracers(config *configs.Config) string {
	const trace = "CAP_SYS_PTRACE"
	switch {
	case !config.Namespaces.Contains(configs.NEWPID):
		return ""
	case config.Namespaces.PathOf(configs.NEWPID) != "":
		return "a pid namespace with other containers, which may trace"
	case config.Capabilities == nil || slices.Contains(config.Capabilities.Bounding, trace):
		return "a container that may trace: " + trace
	}
	return ""
}

func noNewPrivileges(config *configs.Config, p *libcontainer.Process) bool {
	if p.NoNewPrivileges != nil {
		return *p.NoNewPrivileges
	}
	return config.NoNewPrivileges
}

// namesOnly reports whether all variables have a name and can be passed.
func namesOnly(env []string) bool {
	return !slices.ContainsFunc(env, func(v string) bool { return strings.IndexByte(v, '=') < 1 || strings.IndexByte(v, 0) >= 0 })
}

// absolute reports whether all directories of a PATH are.
func absolute(list string) bool {
	return !slices.ContainsFunc(strings.Split(list, ":"), func(dir string) bool { return !path.IsAbs(dir) })
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

// execEnvironment has each variable once, as it was given last, and HOME: that of
// the user, if none is given (prepareEnv of libcontainer).
func execEnvironment(config *configs.Config, p *libcontainer.Process, init int) ([]string, error) {
	var environment []string
	seen := make(map[string]bool)
	for _, variable := range slices.Backward(p.Env) {
		name, value, _ := strings.Cut(variable, "=")
		if !seen[name] && (name != "HOME" || value != "") {
			environment = append(environment, variable)
		}
		seen[name] = true
	}
	slices.Reverse(environment)
	if valueOf(environment, "HOME") != "" {
		return environment, nil
	}
	home, err := homeOf(config, p.UID, init)
	return append(environment, "HOME="+home), err
}

// homeOf reads the container's /etc/passwd. An error says that it has to be read
// by a process in the container: it is on a mount, which may hang, it is no file,
// or the first process has another root by now.
func homeOf(config *configs.Config, uid, init int) (string, error) {
	const none = "/" // where no entry says more
	root, err := os.OpenFile(fmt.Sprintf("/proc/%d/root", init), unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return none, err
	}
	defer root.Close()
	if err := isRoot(root, config.Rootfs); err != nil {
		return none, err
	}
	content, err := readPlain(root, "etc/passwd")
	if errors.Is(err, os.ErrNotExist) {
		return none, nil
	}
	if err != nil {
		return none, err
	}
	users, err := user.ParsePasswdFilter(strings.NewReader(content), func(u user.User) bool { return u.Uid == uid })
	if err != nil || len(users) == 0 {
		return none, nil
	}
	return users[0].Home, nil
}

func isRoot(root *os.File, rootfs string) error {
	its, err := root.Stat()
	if err != nil {
		return err
	}
	made, err := os.Stat(rootfs)
	if err == nil && !os.SameFile(its, made) {
		err = errors.New("the first process of the container has changed its root")
	}
	return err
}

// mostPasswd bounds what of a container is read into memory.
const mostPasswd = 1 << 20

// readPlain reads a regular file that is on the same mount as the root. It is
// looked at before it is opened: to open a pipe would wait for a writer.
func readPlain(root *os.File, name string) (string, error) {
	how := &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT | unix.RESOLVE_NO_MAGICLINKS | unix.RESOLVE_NO_XDEV}
	fd, err := unix.Openat2(int(root.Fd()), name, how)
	if err != nil {
		return "", &os.PathError{Op: "openat2", Path: name, Err: err}
	}
	place := os.NewFile(uintptr(fd), name)
	defer place.Close()
	if info, err := place.Stat(); err != nil || !info.Mode().IsRegular() {
		return "", errors.Join(err, fmt.Errorf("%s is no file", name))
	}
	file, err := os.Open(fmt.Sprintf("/proc/self/fd/%d", place.Fd()))
	if err != nil {
		return "", err
	}
	defer file.Close()
	content, err := io.ReadAll(io.LimitReader(file, mostPasswd+1))
	if len(content) > mostPasswd {
		err = fmt.Errorf("%s is longer than %d bytes", name, mostPasswd)
	}
	return string(content), err
}
