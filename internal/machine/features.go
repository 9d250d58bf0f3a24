package machine

import (
	"errors"
	"fmt"
	"os"
	"strings"

	"golang.org/x/sys/unix"
)

// Feature is something that not every supported kernel has. Distributions add
// features to older kernels and leave some out of newer ones, so each is asked
// for by using it.
type Feature struct {
	Name string
	// Since is the release of Linux that brought it.
	Since string
	// Required: no pod runs without it.
	Required bool
	// Without says what does not work where it is missing.
	Without string
	// Probe returns nil if the feature is there, or else why it is not.
	Probe func() error
}

// Features are all that make a difference, in the order of a report. Some depend
// on the file system of images: root is a directory in it.
func Features(root string) []Feature {
	return []Feature{
		{"namespaces", "3.8", true, "pods cannot be isolated", probeNamespaces},
		{"overlayfs", "3.18", true, "containers have no root file system: modprobe overlay", probeOverlay},
		{"pidfd", "5.3", true, "the end of a process cannot be waited for", probePidfd},
		{"openat2", "5.6", true, "paths in a container's root cannot be resolved safely", probeOpenat2},
		{"seccomp", "3.17", false, "pods that ask for a seccomp profile do not start", probeSeccomp},
		{"recursive read-only mounts", "5.12", false, "mounts with recursive_read_only are refused", probeRecursiveReadOnly},
		{"user namespaces", "5.19", false, "pods with hostUsers: false are not scheduled here", func() error { return probeUserNamespaces(root) }},
	}
}

func probeNamespaces() error {
	for _, namespace := range []string{"net", "mnt", "pid", "ipc", "uts", "user"} {
		if _, err := os.Stat("/proc/self/ns/" + namespace); err != nil {
			return fmt.Errorf("the kernel is built without %s namespaces", namespace)
		}
	}
	return nil
}

// probeOverlay asks as a mount does: that loads the module if it was not needed
// before (fsopen(2), Linux 5.2).
func probeOverlay() error {
	fd, err := unix.Fsopen("overlay", unix.FSOPEN_CLOEXEC)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func probePidfd() error {
	fd, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

func probeOpenat2() error {
	fd, err := unix.Openat2(unix.AT_FDCWD, "/", &unix.OpenHow{Flags: unix.O_PATH | unix.O_CLOEXEC, Resolve: unix.RESOLVE_IN_ROOT})
	if err != nil {
		return err
	}
	return unix.Close(fd)
}

// probeSeccomp asks with an operation on no filter (seccomp(2)): EFAULT is the
// answer of a kernel that has filters.
func probeSeccomp() error {
	const setModeFilter = 1
	_, _, errno := unix.Syscall(unix.SYS_SECCOMP, setModeFilter, 0, 0)
	if errno == unix.EFAULT || errno == unix.EACCES {
		return nil
	}
	return errno
}

// probeRecursiveReadOnly asks with a call that fails in any case, for want of a
// valid descriptor where the kernel has it (mount_setattr(2)).
func probeRecursiveReadOnly() error {
	err := unix.MountSetattr(-1, "", unix.AT_EMPTY_PATH, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	if errors.Is(err, unix.EBADF) {
		return nil
	}
	return err
}

// probeUserNamespaces: pods can have their own, with the owners of files mapped
// by mounts, also of the layers of an overlay. The limit may be 0
// (user_namespaces(7)).
func probeUserNamespaces(root string) error {
	most, err := os.ReadFile("/proc/sys/user/max_user_namespaces")
	if err != nil {
		return err
	}
	if strings.TrimSpace(string(most)) == "0" {
		return errors.New("none are allowed: sysctl -w user.max_user_namespaces=15000")
	}
	return probeMappedOverlay(root)
}
