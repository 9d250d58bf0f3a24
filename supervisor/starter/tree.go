package starter

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// KillTree kills a child of this process and all that it has started, as far as their
// parents are still there. All are stopped, and held by their pidfds, before the first
// is killed: a parent that ends takes its children out of the tree, and one that runs on
// starts others.
func KillTree(root int) {
	held := make(map[int]int) // pidfds by pid
	defer func() {
		for _, pidfd := range held {
			_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0) // it may have ended
			_ = unix.Close(pidfd)
		}
	}()
	for more := true; more; {
		more = false
		for _, pid := range append([]int{root}, descendants(root)...) {
			if _, has := held[pid]; has {
				continue
			}
			pidfd, err := unix.PidfdOpen(pid, 0)
			if err != nil {
				continue // it has ended
			}
			if !descends(pid, root) || unix.PidfdSendSignal(pidfd, unix.SIGSTOP, nil, 0) != nil {
				_ = unix.Close(pidfd)
				continue
			}
			held[pid], more = pidfd, true
			awaitStopped(pid)
		}
	}
}

// stopLimit bounds the wait for a process to stop, which one does that gets a processor
// and does not hang in a system call.
const stopLimit = time.Second

// awaitStopped waits until no thread of a process runs: in the middle of a fork(2) it
// stops when that is done, and its child is there only then.
func awaitStopped(pid int) {
	for deadline := time.Now().Add(stopLimit); !hasStopped(pid) && time.Now().Before(deadline); {
		time.Sleep(100 * time.Microsecond)
	}
}

func hasStopped(pid int) bool {
	threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid)) // none if it has ended
	for _, thread := range threads {
		id, _ := strconv.Atoi(thread.Name())
		// In an uninterruptible sleep (D) it may be in a fork.
		if stat, err := process.ReadStat(id); err == nil && !strings.Contains("TtZX", string(stat.State)) {
			return false
		}
	}
	return true
}

// descendants lists what a process has started, and what those have
// (proc_pid_task_children(5)).
func descendants(root int) (all []int) {
	for next := []int{root}; len(next) > 0; {
		pid := next[0]
		next = next[1:]
		lists, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/children", pid))
		for _, list := range lists {
			content, _ := os.ReadFile(list) // the thread may have ended
			for field := range strings.FieldsSeq(string(content)) {
				if child, err := strconv.Atoi(field); err == nil {
					all, next = append(all, child), append(next, child)
				}
			}
		}
	}
	return all
}

// maxAncestors bounds the way up, during which processes may change.
const maxAncestors = 64

// descends reports whether a process is root, or was started by it: its pid may have
// been given to another one since it was listed.
func descends(pid, root int) bool {
	for range maxAncestors {
		if pid == root {
			return true
		}
		stat, err := process.ReadStat(pid)
		if err != nil || stat.Parent <= 1 {
			return false
		}
		pid = stat.Parent
	}
	return false
}

// IsChild reports whether a process is a child of this one, also one that has ended.
func IsChild(pid int) bool {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return err == nil
		}
	}
}
