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

// reapAfter is how long a child has to be dead before it counts as nobody's.
// Children that the daemon started itself are waited for at once.
const reapAfter = 2 * time.Second

// ReapOrphans reaps adopted children that nobody waits for, such as what a
// plugin left behind, until the context ends.
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
		dead := deadChildren()
		for len(dead) > 0 {
			select {
			case <-ctx.Done():
				return
			case <-time.After(reapAfter):
			}
			dead = reapStillDead(dead)
		}
	}
}

// reapStillDead reaps the dead of the last look that are still there, and
// returns those that died since.
func reapStillDead(before map[int]uint64) map[int]uint64 {
	now := deadChildren()
	for pid, start := range now {
		if before[pid] == start {
			_, _ = unix.Wait4(pid, nil, unix.WNOHANG, nil)
			delete(now, pid)
		}
	}
	return now
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
