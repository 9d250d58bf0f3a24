package runtime

import (
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// What another program says of its processes is not believed: all that is killed
// with a container is found by the pid that it names.

// descends reports whether a process is one of the roots, or was started by one
// through parents that are still there.
func descends(pid int, roots ...int) bool {
	for range mostAncestors {
		if slices.Contains(roots, pid) {
			return true
		}
		var err error
		if pid, err = parentOf(pid); err != nil || pid <= 1 {
			return false
		}
	}
	return false
}

// mostAncestors bounds the way up, during which processes may change.
const mostAncestors = 64

// ofContainer are those of a process's cgroups that were made for the container:
// the rest may hold other processes, the supervisor above all.
func ofContainer(found map[string]string, cgroupsPath string) map[string]string {
	name := cgroupName(cgroupsPath)
	return maps.Collect(func(yield func(string, string) bool) {
		for controller, path := range found {
			if name != "" && slices.Contains(strings.Split(path, "/"), name) && !yield(controller, path) {
				return
			}
		}
	})
}

// cgroupName is the last part of the path that a spec's cgroupsPath asks for; of
// systemd's form, SLICE:PREFIX:NAME, that is the scope.
func cgroupName(cgroupsPath string) string {
	if parts := strings.Split(cgroupsPath, ":"); len(parts) == 3 {
		return parts[1] + "-" + parts[2] + ".scope"
	}
	if name := filepath.Base(cgroupsPath); name != "." && name != "/" {
		return name
	}
	return ""
}

// endHelpers kills what a shim, or a runtime, runs for a container: programs that
// have the container's id in their command line, and what those have started,
// such as hooks. The container's own processes are in cgroups of their own, which
// are not looked at.
func endHelpers(root int, id string) {
	own, err := cgroups.ParseCgroupFile(fmt.Sprintf("/proc/%d/cgroup", root))
	if err != nil {
		return // it is gone
	}
	for _, pid := range descendants(root) {
		command, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if err == nil && strings.Contains(string(command), id) {
			killHelper(pid, own)
		}
	}
}

func killHelper(pid int, own map[string]string) {
	killTree(pid, func(each int) bool {
		now, err := cgroups.ParseCgroupFile(fmt.Sprintf("/proc/%d/cgroup", each))
		return err == nil && maps.Equal(now, own)
	})
}

// killTree kills a process and what it has started, as far as ours says so of a pid:
// what that names is looked at once more when it is held, it may have been given to
// another process. All are stopped and held before the first is killed: a parent that
// ends takes its children out of the tree, and one that runs on starts others.
func killTree(root int, ours func(pid int) bool) {
	held := make(map[int]*Process)
	for more := true; more; {
		more = false
		for _, pid := range append([]int{root}, descendants(root)...) {
			if held[pid] != nil {
				continue
			}
			p, err := openProcess(pid)
			if err != nil {
				continue // it has ended
			}
			if !descends(pid, root) || !ours(pid) || p.Signal(unix.SIGSTOP) != nil {
				_ = p.Close()
				continue
			}
			awaitStopped(pid)
			defer p.Close()
			held[pid], more = p, true
		}
	}
	for _, p := range held {
		_ = p.Signal(unix.SIGKILL) // it may have ended
	}
}

// stopLimit bounds the wait for a process to stop, which one does that gets a processor
// and does not hang in a system call.
const stopLimit = time.Second

// awaitStopped waits until no thread of a process runs any more: in the middle of a fork(2)
// it stops when that is done, and its child is there only then.
func awaitStopped(pid int) {
	for deadline := time.Now().Add(stopLimit); !hasStopped(pid) && time.Now().Before(deadline); {
		time.Sleep(100 * time.Microsecond)
	}
}

// hasStopped: a thread that sleeps uninterruptibly may be in a fork, which waits while
// processes are moved between cgroups of version 1.
func hasStopped(pid int) bool {
	threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid)) // none if it has ended
	return !slices.ContainsFunc(threads, func(thread os.DirEntry) bool {
		id, _ := strconv.Atoi(thread.Name())
		stat, err := process.ReadStat(id)
		return err == nil && !strings.Contains("TtZX", string(stat.State))
	})
}

// descendants are the processes that a process has started and that those have,
// as far as their parents are still there.
func descendants(root int) (all []int) {
	children := make(map[int][]int)
	names, _ := filepath.Glob("/proc/[0-9]*")
	for _, name := range names {
		pid, err := strconv.Atoi(filepath.Base(name))
		if err != nil {
			continue
		}
		if parent, err := parentOf(pid); err == nil {
			children[parent] = append(children[parent], pid)
		}
	}
	for next := children[root]; len(next) > 0; {
		all = append(all, next...)
		var below []int
		for _, pid := range next {
			below = append(below, children[pid]...)
		}
		next = below
	}
	return all
}

// parentOf reads field 4 of proc_pid_stat(5).
func parentOf(pid int) (int, error) {
	content, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		return 0, err
	}
	text := string(content)
	fields := strings.Fields(text[strings.LastIndexByte(text, ')')+1:])
	if len(fields) < 2 {
		return 0, fmt.Errorf("/proc/%d/stat: %.100q", pid, text)
	}
	return strconv.Atoi(fields[1])
}
