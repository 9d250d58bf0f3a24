package cgroup

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"
)

// NotifyOOM sends at each notice of lack of memory, and closes the channel when the
// cgroup is gone: an eventfd on memory.oom_control of version
// 1, modifications of memory.events of version 2. Both wait in the poller: those
// of libcontainer hold a thread each.
func (p Paths) NotifyOOM() (<-chan struct{}, error) {
	directory, err := os.Stat(p.memory())
	if err != nil {
		return nil, fmt.Errorf("OOM notices: %w", err)
	}
	var notices *os.File
	if v1, hasV1 := p["memory"]; hasV1 {
		notices, err = oomEventfd(v1)
	} else {
		// cgroup.events changes when the last process is gone.
		notices, err = watchFiles(filepath.Join(p[""], "memory.events"), filepath.Join(p[""], "cgroup.events"))
	}
	if err != nil {
		return nil, fmt.Errorf("OOM notices: %w", err)
	}
	noticed := make(chan struct{})
	go func() {
		defer close(noticed)
		defer notices.Close()
		for buffer := make([]byte, 4096); ; {
			if _, err := notices.Read(buffer); err != nil || !p.memoryLives(directory) {
				return
			}
			noticed <- struct{}{}
		}
	}()
	return noticed, nil
}

func (p Paths) memory() string {
	if v1, hasV1 := p["memory"]; hasV1 {
		return v1
	}
	return p[""]
}

// memoryLives reports whether the cgroup that is watched is there, and not
// another one of its name, and on version 2 has processes.
func (p Paths) memoryLives(directory os.FileInfo) bool {
	now, err := os.Stat(p.memory())
	if err != nil || !os.SameFile(now, directory) {
		return false
	}
	if _, hasV1 := p["memory"]; hasV1 {
		return true
	}
	events, err := os.ReadFile(filepath.Join(p[""], "cgroup.events"))
	return err == nil && bytes.Contains(events, []byte("populated 1"))
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
