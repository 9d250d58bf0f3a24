package runtime

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"
)

// cgroupsOf are the cgroups of a process by controller, "" for version 2, as
// paths below the mount points.
func cgroupsOf(pid int) (map[string]string, error) {
	own, err := cgroups.ParseCgroupFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil, err
	}
	if cgroups.IsCgroup2UnifiedMode() {
		return map[string]string{"": filepath.Join("/sys/fs/cgroup", own[""])}, nil
	}
	found := make(map[string]string)
	for controller, path := range own {
		if controller == "" {
			continue // the hybrid hierarchy has no controllers
		}
		root, mountErr := cgroups.FindCgroupMountpoint("", controller)
		if cgroups.IsNotFound(mountErr) {
			continue // named hierarchies that are mounted nowhere
		}
		if mountErr != nil {
			err = errors.Join(err, mountErr)
			continue
		}
		found[controller] = filepath.Join(root, path)
	}
	return found, err
}

// NotifyOOM is of Container: an eventfd on memory.oom_control of version 1,
// modifications of memory.events of version 2.
func (c *commandContainer) NotifyOOM() (<-chan struct{}, error) {
	var notices *os.File
	var err error
	if path, v2 := c.cgroups[""]; v2 {
		// cgroup.events changes when the last process is gone.
		notices, err = watchFiles(filepath.Join(path, "memory.events"), filepath.Join(path, "cgroup.events"))
	} else {
		notices, err = oomEventfd(c.cgroups["memory"])
	}
	if err != nil {
		return nil, fmt.Errorf("OOM notices of container %s: %w", c.id, err)
	}
	noticed := make(chan struct{})
	go func() {
		defer close(noticed)
		defer notices.Close()
		for buffer := make([]byte, 4096); ; {
			if _, err := notices.Read(buffer); err != nil || !c.cgroupLives() {
				return
			}
			noticed <- struct{}{}
		}
	}()
	return noticed, nil
}

// cgroupLives reports whether the container's cgroup is there and, on version
// 2, has processes.
func (c *commandContainer) cgroupLives() bool {
	_, path, ok := tracker(c.cgroups)
	if !ok {
		return false
	}
	if _, v2 := c.cgroups[""]; v2 {
		events, err := os.ReadFile(filepath.Join(path, "cgroup.events"))
		return err == nil && bytes.Contains(events, []byte("populated 1"))
	}
	_, err := os.Stat(path)
	return err == nil
}

// watchFiles is an inotify descriptor for changes of files.
func watchFiles(paths ...string) (*os.File, error) {
	fd, err := unix.InotifyInit1(unix.IN_CLOEXEC | unix.IN_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("inotify_init1", err)
	}
	file := os.NewFile(uintptr(fd), "inotify:"+paths[0])
	for _, path := range paths {
		if _, err := unix.InotifyAddWatch(fd, path, unix.IN_MODIFY|unix.IN_DELETE_SELF); err != nil {
			return nil, errors.Join(os.NewSyscallError("inotify_add_watch", err), file.Close())
		}
	}
	return file, nil
}

// oomEventfd is an eventfd that counts OOM notices of a memory cgroup of
// version 1; it becomes readable when the cgroup is removed, too
// (Documentation/admin-guide/cgroup-v1/memory.rst, section 10).
func oomEventfd(path string) (*os.File, error) {
	control, err := os.Open(filepath.Join(path, "memory.oom_control"))
	if err != nil {
		return nil, err
	}
	defer control.Close()
	fd, err := unix.Eventfd(0, unix.EFD_CLOEXEC|unix.EFD_NONBLOCK)
	if err != nil {
		return nil, os.NewSyscallError("eventfd", err)
	}
	notices := os.NewFile(uintptr(fd), "oom:"+path)
	wanted := fmt.Sprintf("%d %d", fd, control.Fd())
	if err := os.WriteFile(filepath.Join(path, "cgroup.event_control"), []byte(wanted), 0); err != nil {
		return nil, errors.Join(err, notices.Close())
	}
	return notices, nil
}
