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

// Orphans are processes that come to the daemon when their parent dies, and
// whose exit status is needed.
type Orphans interface {
	// Known reports whether the process is such a one, and never a child that
	// the daemon has started itself.
	Known(Facts) bool
	// Ended receives the exit status of a known one, which has been reaped.
	Ended(Facts, unix.WaitStatus)
}

// reaper reaps adopted children.
type reaper struct {
	known Orphans
	first int                 // the pid that waitid(2) named last, 0 for none
	since map[Facts]time.Time // when the dead that are left were first seen
}

// lookAfter is how long the first of the dead may hide others: the daemon's own
// children are waited for sooner.
const lookAfter = 20 * time.Millisecond

// ReapOrphans reaps adopted children that nothing waits for, such as what a
// plugin left behind, until the context ends: known ones within lookAfter. The
// list of all children, each pod may have one, is read only when the same child is
// still dead after that. For waitid(2) the kernel walks them, so there is one look
// for all that end within lookAfter, and what a SIGCHLD costs does not grow with
// the children.
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

// look reaps what can be reaped now, and says when to look again; 0 if no child
// is dead.
func (r *reaper) look() time.Duration {
	for {
		pid := firstDead()
		if pid == 0 {
			r.first = 0
			clear(r.since)
			return 0
		}
		stat, err := ReadStat(pid)
		if err == nil && r.isKnown(Facts{PID: pid, StartTime: stat.StartTime}) {
			r.reap(Facts{PID: pid, StartTime: stat.StartTime})
			continue
		}
		if pid != r.first {
			r.first = pid
			return lookAfter
		}
		return r.lookAtAll()
	}
}

// lookAtAll reaps, of all children, the known dead, and others that have been
// dead for reapAfter.
func (r *reaper) lookAtAll() time.Duration {
	left := make(map[Facts]time.Time)
	for pid, start := range deadChildren() {
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
