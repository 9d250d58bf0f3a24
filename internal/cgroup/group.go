package cgroup

import (
	"bufio"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"
)

// Group is a cgroup in one hierarchy that only holds processes together: what
// is started inside stays inside, whatever session, group or environment it
// gives itself, so it can be listed and ended. It limits nothing.
type Group struct {
	// Dir is the cgroup's directory.
	Dir string `json:"dir"`
	// V2 reports whether the hierarchy is one of version 2.
	V2 bool `json:"v2"`
}

// holding are the version 1 controllers whose hierarchy is used, the best
// first. The freezer is the last: other programs move processes there to freeze them. A
// cpuset takes no process before it has processors.
var holding = []string{"pids", "devices", "blkio", "cpuacct", "memory", "freezer"}

// GroupParent finds where the groups of this process may be made: at path
// below a hierarchy, or in the cgroup of this process if path is "". A hierarchy of
// version 2 comes first: a process can be born in a cgroup of it.
func GroupParent(path string) (Group, error) {
	own, err := cgroups.ParseCgroupFile("/proc/self/cgroup")
	if err != nil {
		return Group{}, fmt.Errorf("find the cgroup of this process: %w", err)
	}
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return Group{}, fmt.Errorf("find the cgroup hierarchies: %w", err)
	}
	for _, m := range mounts {
		if m.FSType == "cgroup2" {
			return Group{Dir: below(m, path, own[""]), V2: true}, nil
		}
	}
	for _, controller := range holding {
		for _, m := range mounts {
			if m.FSType == "cgroup" && slices.Contains(strings.Split(m.VFSOptions, ","), controller) {
				return Group{Dir: below(m, path, own[controller])}, nil
			}
		}
	}
	return Group{}, errors.New("no cgroup hierarchy is mounted that holds processes: mount cgroup2 on /sys/fs/cgroup")
}

// below is the directory of a path, or of our own cgroup, in a mount that may
// show a part of the hierarchy only, as in a container.
func below(m *mountinfo.Info, path, own string) string {
	if path != "" {
		return filepath.Join(m.Mountpoint, filepath.Clean("/"+path))
	}
	inside, err := filepath.Rel(m.Root, own)
	if err != nil || strings.HasPrefix(inside, "..") {
		return m.Mountpoint
	}
	return filepath.Join(m.Mountpoint, inside)
}

// Child is the group of that name below this one; it is not made.
func (g Group) Child(name string) Group { return Group{Dir: filepath.Join(g.Dir, name), V2: g.V2} }

// Make makes the cgroup, and those above it that are missing.
func (g Group) Make() error {
	if err := os.MkdirAll(g.Dir, 0o755); err != nil {
		return fmt.Errorf("make a cgroup: %w", err)
	}
	return nil
}

// Start starts a command whose process is born in the cgroup.
func (g Group) Start(command *exec.Cmd) error {
	if !g.V2 {
		return g.startFromInside(command)
	}
	dir, err := os.Open(g.Dir)
	if err != nil {
		return fmt.Errorf("enter a cgroup: %w", err)
	}
	defer dir.Close()
	if command.SysProcAttr == nil {
		command.SysProcAttr = &syscall.SysProcAttr{}
	}
	command.SysProcAttr.UseCgroupFD, command.SysProcAttr.CgroupFD = true, int(dir.Fd())
	return command.Start()
}

// startFromInside is Start on version 1, where a process begins in the cgroup of
// the thread that forks it. The thread that enters the cgroup for that ends then;
// until it has, Processes lists this process, which Kill leaves out.
func (g Group) startFromInside(command *exec.Cmd) error {
	started := make(chan error, 1)
	go func() {
		runtime.LockOSThread() // and never unlocked: the thread ends with the goroutine
		if unix.Gettid() == unix.Getpid() {
			// The main thread never ends. While it is held here, the next goroutine
			// gets another one.
			started <- g.startFromInside(command)
			runtime.UnlockOSThread()
			return
		}
		if err := os.WriteFile(filepath.Join(g.Dir, "tasks"), []byte("0"), 0); err != nil {
			started <- fmt.Errorf("enter a cgroup: %w", err)
			return
		}
		started <- command.Start()
	}()
	return <-started
}

// Empty reports whether no process is inside, below included. A cgroup that is
// not there is empty.
func (g Group) Empty() (bool, error) {
	if g.V2 {
		return g.unpopulated()
	}
	if g.parted() {
		pids, err := g.Processes()
		return len(pids) == 0, err
	}
	data, err := os.ReadFile(filepath.Join(g.Dir, "cgroup.procs"))
	return len(data) == 0, ignoreGone(err)
}

// parted reports whether there are cgroups below this one.
func (g Group) parted() bool {
	const own = 2 // links of a directory: its name and its "."
	var stat unix.Stat_t
	return unix.Stat(g.Dir, &stat) == nil && stat.Nlink > own
}

// unpopulated reads cgroup.events, which counts the cgroups below too and, as
// cgroup.procs does not, leaves out what has ended and waits to be reaped.
func (g Group) unpopulated() (bool, error) {
	file, err := os.Open(filepath.Join(g.Dir, "cgroup.events"))
	if err != nil {
		return errors.Is(err, fs.ErrNotExist), ignoreGone(err)
	}
	defer file.Close()
	lines := bufio.NewScanner(file)
	for lines.Scan() {
		if lines.Text() == "populated 1" {
			return false, nil
		}
	}
	err = ignoreGone(lines.Err())
	return err == nil, err
}

// Processes are those inside and below. One of a foreign pid namespace, which
// the kernel lists as 0, is listed as 0 here too.
func (g Group) Processes() ([]int, error) {
	var pids []int
	err := filepath.WalkDir(g.Dir, func(dir string, entry fs.DirEntry, err error) error {
		if err != nil {
			return ignoreGone(err)
		}
		if !entry.IsDir() {
			return nil
		}
		inside, err := cgroups.GetPids(dir)
		pids = append(pids, inside...)
		return ignoreGone(err)
	})
	if err != nil {
		return nil, fmt.Errorf("list the processes of cgroup %s: %w", g.Dir, err)
	}
	return pids, nil
}

// Kill sends SIGKILL to everything inside until nothing is left, for no longer
// than the limit; what does not go (a frozen process, an uninterruptible
// sleep) is ErrBusy, with its pids.
func (g Group) Kill(limit time.Duration) error {
	deadline := time.Now().Add(limit)
	for pause := time.Millisecond; ; pause = min(2*pause, 50*time.Millisecond) {
		empty, err := g.Empty()
		if err != nil || empty {
			return err
		}
		if err := g.killOnce(); err != nil {
			return err
		}
		if time.Now().After(deadline) {
			pids, _ := g.Processes()
			return fmt.Errorf("cgroup %s, processes %v: %w", g.Dir, pids, ErrBusy)
		}
		time.Sleep(pause)
	}
}

// killOnce uses cgroup.kill (Linux 5.14), which no fork outruns, or signals
// one process after the other.
func (g Group) killOnce() error {
	if g.V2 && os.WriteFile(filepath.Join(g.Dir, "cgroup.kill"), []byte("1"), 0) == nil {
		return nil
	}
	pids, err := g.Processes()
	if err != nil {
		return err
	}
	opened := make(map[int]int, len(pids))
	for _, pid := range pids {
		// 0 is a process that we cannot name; kill(2) takes it for our group. We are
		// listed ourselves while a thread starts a command.
		if pid <= 0 || pid == os.Getpid() {
			continue
		}
		if fd, err := unix.PidfdOpen(pid, 0); err == nil {
			opened[pid] = fd
			defer unix.Close(fd)
		}
	}
	// Looked at again: a pid that is still inside is that of the pidfd.
	pids, err = g.Processes()
	for _, pid := range pids {
		if fd, found := opened[pid]; found {
			_ = unix.PidfdSendSignal(fd, unix.SIGKILL, nil, 0)
		}
	}
	return err
}

// Remove removes the cgroup and those below; all have to be empty. One that is
// not there is no error.
func (g Group) Remove() error {
	// A process that has been waited for may be inside for some microseconds
	// more. RemovePath looks again after 10 ms only.
	const tries, pause = 20, 100 * time.Microsecond
	for range tries {
		if err := unix.Rmdir(g.Dir); !errors.Is(err, unix.EBUSY) {
			break
		}
		time.Sleep(pause)
	}
	if err := cgroups.RemovePath(g.Dir); err != nil {
		return fmt.Errorf("remove cgroup: %w", err)
	}
	return nil
}
