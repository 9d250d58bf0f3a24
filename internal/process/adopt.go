package process

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Adopt makes this process the parent of descendants whose parent ends
// (PR_SET_CHILD_SUBREAPER(2const)): process 1 may be slow to reap them, and a
// pause process has no other parent.
func Adopt() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the reaper of orphans: %w", err)
	}
	return nil
}

// reapAfter is how long a child has to be dead before it counts as an orphan.
// Children that the daemon started itself are waited for at once.
const reapAfter = 2 * time.Second

// ReapOrphans reaps adopted children that nothing waits for, such as what a
// plugin left behind, until the context ends. The list of all children, each pod
// has one, is read only when the same child was dead for reapAfter: a SIGCHLD
// costs a waitid(2).
func ReapOrphans(ctx context.Context) {
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, unix.SIGCHLD)
	defer signal.Stop(changed)
	for {
		select {
		case <-ctx.Done():
			return
		case <-changed:
		}
		for dead := firstDead(); dead != 0; {
			if !sleep(ctx, reapAfter) {
				return
			}
			still := firstDead()
			if still == dead && !reapDead(ctx) {
				return
			}
			dead = still
		}
	}
}

func sleep(ctx context.Context, d time.Duration) (slept bool) {
	select {
	case <-ctx.Done():
		return false
	case <-time.After(d):
		return true
	}
}

// reapDead reaps the children that stay dead for reapAfter, those of other
// threads' too.
func reapDead(ctx context.Context) (done bool) {
	before := deadChildren()
	if !sleep(ctx, reapAfter) {
		return false
	}
	for pid, start := range deadChildren() {
		if before[pid] == start {
			_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
		}
	}
	return true
}

// firstDead is the pid of a child that is dead and not reaped, 0 if there is
// none. It stays as it is (waitid(2), WNOWAIT).
func firstDead() int {
	var info unix.Siginfo
	for {
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if err == nil {
			return pidOf(&info)
		}
		if err != unix.EINTR {
			return 0 // ECHILD: no children
		}
	}
}

// pidOf is the field si_pid of a siginfo_t of SIGCHLD, which is the first after
// the three that all have (sigaction(2)); where pointers have 64 bits, the union
// begins at 16.
func pidOf(info *unix.Siginfo) int {
	offset := unsafe.Sizeof(info.Signo) + unsafe.Sizeof(info.Errno) + unsafe.Sizeof(info.Code)
	offset = (offset + unsafe.Sizeof(uintptr(0)) - 1) &^ (unsafe.Sizeof(uintptr(0)) - 1)
	return int(*(*int32)(unsafe.Add(unsafe.Pointer(info), offset)))
}

// deadChildren maps the pid of each zombie among our children to its start.
func deadChildren() map[int]uint64 {
	dead := make(map[int]uint64)
	files, err := filepath.Glob("/proc/self/task/*/children")
	if err != nil {
		return dead
	}
	for _, file := range files {
		data, err := os.ReadFile(file)
		if err != nil {
			continue // the thread has ended
		}
		for _, field := range strings.Fields(string(data)) {
			pid, err := strconv.Atoi(field)
			if err != nil {
				continue
			}
			if stat, err := ReadStat(pid); err == nil && stat.State == 'Z' {
				dead[pid] = stat.StartTime
			}
		}
	}
	return dead
}
