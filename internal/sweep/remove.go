package sweep

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
)

// Remove removes an orphan by what the kernel and the disk show, without a
// daemon. The snapshot below a container's files stays: it is the image store's,
// which removes it with its daemon's next start.
func (p *Places) Remove(o Orphan) error {
	switch o.Kind {
	case ContainerCgroup, PodCgroup:
		return p.Hierarchies.Remove(o.Path, p.Kill)
	case Netns:
		return p.Netns.Remove(o.ID)
	case Userns:
		return p.Userns.Remove(o.ID)
	case Supervisor:
		if err := p.killSupervisor(o.Path); err != nil {
			return err
		}
	}
	if err := unmountAll(o.Path); err != nil {
		return err
	}
	if err := state.RemoveAll(o.Path); err != nil {
		return fmt.Errorf("remove %s: %w", o.Kind, err)
	}
	return nil
}

// killSupervisor kills the supervisor that serves in a directory, if there is one.
func (p *Places) killSupervisor(dir string) error {
	commands, err := filepath.Glob("/proc/[0-9]*/cmdline")
	if err != nil {
		return err
	}
	for _, path := range commands {
		pid, err := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if err != nil {
			return err
		}
		if !serves(pid, dir) {
			continue
		}
		stat, err := process.ReadStat(pid)
		var supervisor *process.Process
		if err == nil {
			supervisor, err = process.Open(process.Facts{PID: pid, StartTime: stat.StartTime})
		}
		if errors.Is(err, process.ErrGone) {
			continue
		}
		if err != nil {
			return fmt.Errorf("kill the supervisor in %s: %w", dir, err)
		}
		if serves(pid, dir) { // still: the pid has not been given to another process
			err = supervisor.Kill(p.Kill)
		}
		if err := errors.Join(err, supervisor.Close()); err != nil {
			return fmt.Errorf("kill the supervisor in %s: %w", dir, err)
		}
	}
	return nil
}

// serves reports whether a process is the supervisor of a directory.
func serves(pid int, dir string) bool {
	line, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
	arguments := strings.Split(string(line), "\x00")
	return err == nil && len(arguments) > 1 && arguments[1] == "serve" && slices.Contains(arguments, dir)
}

// unmountAll unmounts what is mounted at a directory and below it, the topmost
// mount first.
func unmountAll(dir string) error {
	parent, err := filepath.EvalSymlinks(filepath.Dir(dir)) // as mountinfo shows it
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(filepath.Join(parent, filepath.Base(dir))))
	if err != nil {
		return err
	}
	for i := len(mounts) - 1; i >= 0; i-- {
		err := unix.Unmount(mounts[i].Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // unmounted meanwhile
			return fmt.Errorf("unmount %s: %w", mounts[i].Mountpoint, err)
		}
	}
	return nil
}
