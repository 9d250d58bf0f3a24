package process

import (
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"
)

// KillTree kills a child of this process and all that it has started, as far as their
// parents are still there. All are stopped, and held by their pidfds, before the first
// is killed: a parent that ends takes its children out of the tree, and one that runs on
// starts others. The root is the last to be killed, so that the tree is found again if
// this process dies meanwhile.
func KillTree(root int) {
	held := make(map[int]bool)
	var pidfds []int
	defer func() {
		for _, pidfd := range slices.Backward(pidfds) {
			_ = unix.PidfdSendSignal(pidfd, unix.SIGKILL, nil, 0) // it may have ended
			_ = unix.Close(pidfd)
		}
	}()
	for more := true; more; {
		more = false
		for _, pid := range append([]int{root}, descendants(root)...) {
			if held[pid] {
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
			held[pid], more = true, true
			pidfds = append(pidfds, pidfd)
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
	for deadline := time.Now().Add(stopLimit); !HasStopped(pid) && time.Now().Before(deadline); {
		time.Sleep(100 * time.Microsecond)
	}
}

// HasStopped reports whether no thread of a process runs.
func HasStopped(pid int) bool {
	threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid)) // none if it has ended
	for _, thread := range threads {
		id, _ := strconv.Atoi(thread.Name())
		// In an uninterruptible sleep (D) it may be in a fork.
		if stat, err := ReadStat(id); err == nil && !strings.Contains("TtZX", string(stat.State)) {
			return false
		}
	}
	return true
}

// descendants lists what a process has started, and what those have.
func descendants(root int) (all []int) {
	for next := []int{root}; len(next) > 0; next = next[1:] {
		more := Children(strconv.Itoa(next[0]))
		all, next = append(all, more...), append(next, more...)
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
		stat, err := ReadStat(pid)
		if err != nil || stat.Parent <= 1 {
			return false
		}
		pid = stat.Parent
	}
	return false
}
