package launch

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/user"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// environmentOf has each variable once, as it was given last, and HOME: that of
// the user, if none is given (prepareEnv of libcontainer).
func environmentOf(p *specs.Process, e Exec) ([]string, error) {
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
	if valueOf(environment, "HOME") != "" {
		return environment, nil
	}
	return append(environment, "HOME="+homeOf(p.User.UID, e.Spec.Root.Path)), nil
}

// homeOf is the user's entry in the /etc/passwd of a root, "/" where there is none. The
// root is opened on the node: what the container has mounted is not seen, and cannot
// hang.
func homeOf(uid uint32, rootfs string) string {
	const none = "/"
	root, err := os.OpenFile(rootfs, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return none
	}
	defer root.Close()
	content, err := readPlain(root, "etc/passwd")
	if err != nil {
		return none
	}
	users, err := user.ParsePasswdFilter(strings.NewReader(content), func(u user.User) bool { return u.Uid == int(uid) })
	if err != nil || len(users) == 0 {
		return none
	}
	return users[0].Home
}

// needsPasswd reports whether the environment has no HOME and the container's
// /etc/passwd is on a volume.
func needsPasswd(spec *specs.Spec, p *specs.Process) bool {
	return valueOf(p.Env, "HOME") == "" && slices.ContainsFunc(spec.Mounts, func(m specs.Mount) bool {
		switch path.Clean(m.Destination) {
		case "/", "/etc", "/etc/passwd":
			return true
		}
		return false
	})
}

// mostPasswd bounds what of a container is read into memory.
const mostPasswd = 1 << 20

// readPlain reads a regular file that is on the same mount as the root. It is
// looked at before it is opened, and does not wait for who has a lease on it
// (fcntl(2), F_SETLEASE).
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
	file, err := os.OpenFile(fmt.Sprintf("/proc/self/fd/%d", place.Fd()), unix.O_RDONLY|unix.O_NONBLOCK, 0)
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
