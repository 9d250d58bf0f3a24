package runtime

import (
	"errors"
	"fmt"
	"os"

	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/namespace"
)

// launchedRoot is where the root of a launched process is mounted in the copy of the
// empty mount namespace, until it is the root.
const launchedRoot = "/root"

// openEmptyMounts is a mount namespace with an empty directory and nothing else, in
// memory since the first use. A launch copies it: a process that is cloned with a
// mount namespace of its own gets a copy of all mounts of the node, of which each pod
// has some, and has to unmount them again.
func (b *Builtin) openEmptyMounts() (*os.File, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.emptyMounts == nil {
		made, err := makeEmptyMounts()
		if err != nil {
			return nil, fmt.Errorf("make an empty mount namespace: %w", err)
		}
		b.emptyMounts = made
	}
	return copyFile(b.emptyMounts)
}

// makeEmptyMounts unshares the mounts, and puts a tmpfs in the place of all of them.
func makeEmptyMounts() (made *os.File, err error) {
	err = namespace.OnDisposableThread(func() error {
		if err := unix.Unshare(unix.CLONE_NEWNS); err != nil {
			return os.NewSyscallError("unshare", err)
		}
		file, err := os.Open("/proc/thread-self/ns/mnt")
		if err != nil {
			return err
		}
		if err := mountNothingElse(); err != nil {
			return errors.Join(err, file.Close())
		}
		made = file
		return nil
	})
	return made, err
}

// mountNothingElse: /proc is only a directory that every node has.
func mountNothingElse() error {
	const over = "/proc"
	for _, step := range []struct {
		what string
		do   func() error
	}{
		{"make the mounts private", func() error { return unix.Mount("", "/", "", unix.MS_PRIVATE|unix.MS_REC, "") }},
		{"mount a tmpfs", func() error {
			return unix.Mount("tmpfs", over, "tmpfs", unix.MS_NOSUID|unix.MS_NODEV|unix.MS_NOEXEC, "mode=0755")
		}},
		{"enter it", func() error { return unix.Chdir(over) }},
		{"make a directory for roots", func() error { return unix.Mkdir("."+launchedRoot, 0o755) }},
		{"change the root", func() error { return unix.PivotRoot(".", ".") }},
		{"unmount all others", func() error { return unix.Unmount(".", unix.MNT_DETACH) }},
	} {
		if err := step.do(); err != nil {
			return fmt.Errorf("%s: %w", step.what, err)
		}
	}
	return nil
}

// openTree is a copy of what is mounted at a path, for a launch to mount where it
// is.
func openTree(path string, flags uint) func() (*os.File, error) {
	return func() (*os.File, error) {
		fd, err := unix.OpenTree(unix.AT_FDCWD, path, flags|unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
		if err != nil {
			return nil, &os.PathError{Op: "open_tree", Path: path, Err: err}
		}
		return os.NewFile(uintptr(fd), path), nil
	}
}

// trees opens what a launch mounts: the root first, then what is bound, in the order
// of the mounts.
func trees(config *configs.Config) (open []func() (*os.File, error)) {
	open = append(open, openTree(config.Rootfs, unix.AT_RECURSIVE))
	for _, m := range config.Mounts {
		if m.Device == "bind" {
			open = append(open, openTree(m.Source, 0))
		}
	}
	return open
}

func copyFile(file *os.File) (*os.File, error) {
	fd, err := unix.FcntlInt(file.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fd), file.Name()), nil
}
