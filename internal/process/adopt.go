package process

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
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

// reapAfter is how long a child has to be dead before it counts as an orphan.
// Children that the daemon started itself are waited for at once.
const reapAfter = 2 * time.Second

// Orphans are processes that come to the daemon when their parent dies, and
// whose exit status is needed.
type Orphans interface {
	// Known reports whether the process is such a one, and never a child that
	// the daemon has started itself.
	Known(Facts) bool
	// Ended receives the exit status of a known one, which has been reaped.
	Ended(Facts, unix.WaitStatus)
}

// held are the pids of children that Hold leaves to their waiters.
var held sync.Map

// Hold has ReapOrphans leave a child of this process to its waiter, however late that
// waits. A child that is dead and not reaped keeps its pid, so signals to that, to its
// process group and to its tree reach no other process. It is called when the child has
// been started, and release when it has been waited for.
func Hold(pid int) (release func()) {
	held.Store(pid, nil)
	return func() { held.Delete(pid) }
}

// reaper reaps adopted children.
type reaper struct {
	known Orphans
	since map[Facts]time.Time // when the dead that are left were first seen
}

// lookAfter is how long the reaper waits after a SIGCHLD: the daemon's own children are
// waited for sooner.
const lookAfter = 20 * time.Millisecond

// ReapOrphans reaps adopted children that nothing waits for, such as what a
// plugin left behind, until the context ends: known ones within lookAfter. The
// list of all children, each pod may have one, is read only when a child is dead.
func ReapOrphans(ctx context.Context, known Orphans) {
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, unix.SIGCHLD)
	defer signal.Stop(changed)
	r := &reaper{known: known, since: make(map[Facts]time.Time)}
	for {
		var later <-chan time.Time
		if pause := r.look(); pause > 0 {
			later = time.After(pause)
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(lookAfter):
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-later:
		}
	}
}

// look reaps, of the children that are dead, the known ones, and others that have been
// dead for reapAfter and that nobody holds, and says when to look again; 0 if no child is dead.
func (r *reaper) look() time.Duration {
	if !anyDead() {
		clear(r.since)
		return 0
	}
	left := make(map[Facts]time.Time)
	for pid, start := range deadChildren() {
		if _, is := held.Load(pid); is {
			continue
		}
		dead := Facts{PID: pid, StartTime: start}
		since, seen := r.since[dead]
		if !seen {
			since = time.Now()
		}
		if r.isKnown(dead) || time.Since(since) >= reapAfter {
			r.reap(dead)
			continue
		}
		left[dead] = since
	}
	r.since = left
	return reapAfter
}

func (r *reaper) isKnown(dead Facts) bool { return r.known != nil && r.known.Known(dead) }

func (r *reaper) reap(dead Facts) {
	var status unix.WaitStatus
	reaped, err := unix.Wait4(dead.PID, &status, unix.WNOHANG, nil)
	if err == nil && reaped == dead.PID && r.isKnown(dead) {
		r.known.Ended(dead, status)
	}
}

// anyDead reports whether a child is dead and not reaped. It stays as it is (waitid(2),
// WNOWAIT).
func anyDead() bool {
	var info unix.Siginfo
	for {
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if err != unix.EINTR {
			return err == nil && info.Signo != 0 // ECHILD: no children
		}
	}
}

// deadChildren maps the pid of each zombie among our children to its start.
func deadChildren() map[int]uint64 {
	dead := make(map[int]uint64)
	for _, pid := range Children("self") {
		if stat, err := ReadStat(pid); err == nil && stat.State == 'Z' {
			dead[pid] = stat.StartTime
		}
	}
	return dead
}

// Children lists the children of all threads of a process, a pid or "self"
// (proc_pid_task_children(5)).
func Children(of string) (pids []int) {
	files, _ := filepath.Glob("/proc/" + of + "/task/*/children") // a good pattern
	for _, file := range files {
		data, _ := os.ReadFile(file) // the thread may have ended
		for field := range strings.FieldsSeq(string(data)) {
			if pid, err := strconv.Atoi(field); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}
