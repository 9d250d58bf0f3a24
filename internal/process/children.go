package process

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Parent is the only place where a supervisor waits for children: for starters, launched processes, and as their
// sub-reaper for containers and the processes in them. No other part, os/exec included, may wait for a child.
//
// A child has an owner before it can be reaped: [Parent.Start] holds the lock while it forks, and a
// process that our child made is owned ([Parent.Own]) while that child lives. A child without an owner
// is an orphan of a container; it is reaped and forgotten.
type Parent struct {
	signals chan os.Signal

	mu    sync.Mutex // held while a child is forked, which nothing can stop, and while it is reaped
	owned map[int]*Child
}

// NewParent makes this process the sub-reaper of its descendants.
func NewParent() (*Parent, error) {
	if err := Adopt(); err != nil {
		return nil, err
	}
	p := &Parent{signals: make(chan os.Signal, 1), owned: make(map[int]*Child)}
	signal.Notify(p.signals, syscall.SIGCHLD)
	return p, nil
}

// Run reaps until ctx ends.
func (p *Parent) Run(ctx context.Context) {
	defer signal.Stop(p.signals)
	for {
		p.reap()
		select {
		case <-ctx.Done():
			return
		case <-p.signals:
		}
	}
}

// reap waits for all children that have ended (wait(2)), for an owned one after its before. No signal interrupts that.
func (p *Parent) reap() {
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		pid := int(sigchldPID(&info))
		if err != nil || pid == 0 {
			return
		}
		p.reapOne(pid)
	}
}

func (p *Parent) reapOne(pid int) {
	p.mu.Lock()
	child := p.owned[pid]
	p.mu.Unlock()
	if child != nil && child.before != nil {
		child.before(pid)
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	var status syscall.WaitStatus
	_, _ = syscall.Wait4(pid, &status, 0, nil) // it has ended, so this waits for nothing
	if child := p.owned[pid]; child != nil {
		delete(p.owned, pid)
		child.status = status
		close(child.exited)
	}
}

// sigchldPID returns waitid(2)'s si_pid, 0 if no child has ended.
func sigchldPID(info *unix.Siginfo) int32 {
	if info.Signo == 0 {
		return 0
	}
	type sigchld struct {
		_   [4]int32 // si_signo, si_errno, si_code; the union begins at a multiple of 8
		pid int32
	}
	return (*sigchld)(unsafe.Pointer(info)).pid
}

// Start owns the child that fork makes or finds, before it can be reaped. fork must not wait for the child. before is
// as for Own.
func (p *Parent) Start(fork func() (pid int, err error), before func(pid int)) (*Child, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pid, err := fork()
	if err != nil {
		return nil, err
	}
	return p.own(pid, before)
}

// Own makes pid a child with an owner: our child, or that of a living child of ours, which leaves it to us.
// before, if any, is called when the child has ended, before it is reaped. Until it returns no child is reaped.
func (p *Parent) Own(pid int, before func(pid int)) (*Child, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.own(pid, before)
}

func (p *Parent) own(pid int, before func(pid int)) (*Child, error) {
	if p.owned[pid] != nil {
		return nil, fmt.Errorf("process %d has an owner already", pid)
	}
	child := &Child{PID: pid, before: before, exited: make(chan struct{})}
	p.owned[pid] = child
	return child, nil
}

// Child is a child with an owner.
type Child struct {
	PID    int
	before func(pid int)
	exited chan struct{}
	status syscall.WaitStatus
}

// Exited is closed when the child has exited and is reaped. Until then no other process has its pid.
func (c *Child) Exited() <-chan struct{} { return c.exited }

// HasExited reports whether the child has exited and is reaped.
func (c *Child) HasExited() bool {
	select {
	case <-c.exited:
		return true
	default:
		return false
	}
}

// Wait waits for the exit and returns its status.
func (c *Child) Wait() syscall.WaitStatus {
	<-c.exited
	return c.status
}

// Adopt makes this process the parent of orphaned descendants (PR_SET_CHILD_SUBREAPER(2const)): process
// 1 may be slow to reap them, and a pause has no other parent.
func Adopt() error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become the reaper of orphans: %w", err)
	}
	return nil
}

const (
	reapAfter = 2 * time.Second       // until a dead child is an orphan: the daemon waits for its own at once
	reapPause = 20 * time.Millisecond // before a look at the dead, for the same reason
	stopLimit = time.Second           // for KillTree to stop one process
	stopPause = 100 * time.Microsecond
)

// Orphans are processes that come to the daemon when their parent dies, and whose exit status it needs.
type Orphans interface {
	// Known reports whether the process is one, and not a child that the daemon started.
	Known(Facts) bool
	// Ended receives the exit status of a known one, which has been reaped.
	Ended(Facts, unix.WaitStatus)
}

// claimed are the pids of children that Claim leaves to their waiters.
var claimed sync.Map

// Claim has ReapOrphans leave a child to its waiter: until then no other process has its pid or its group.
func Claim(pid int) (release func()) {
	claimed.Store(pid, nil)
	return func() { claimed.Delete(pid) }
}

// ReapOrphans reaps adopted children that nothing waits for, such as what a plugin left, until the context
// ends: known ones within milliseconds, others that are not claimed after reapAfter.
func ReapOrphans(ctx context.Context, known Orphans) {
	changed := make(chan os.Signal, 1)
	signal.Notify(changed, unix.SIGCHLD)
	defer signal.Stop(changed)
	since := make(map[Facts]time.Time) // when the dead that are left were first seen
	for {
		var later <-chan time.Time
		if since = reap(known, since); len(since) > 0 {
			later = time.After(reapAfter)
		}
		select {
		case <-ctx.Done():
			return
		case <-changed:
		case <-later:
		}
		time.Sleep(reapPause)
	}
}

// reap looks at the children once, and returns the zombies that are left.
func reap(known Orphans, since map[Facts]time.Time) map[Facts]time.Time {
	left := make(map[Facts]time.Time)
	for _, pid := range Children("self") {
		stat, err := ReadStat(pid)
		if _, is := claimed.Load(pid); is || err != nil || stat.State != 'Z' {
			continue
		}
		dead := Facts{PID: pid, StartTime: stat.StartTime}
		isKnown := known != nil && known.Known(dead)
		first, seen := since[dead]
		if !seen {
			first = time.Now()
		}
		if !isKnown && time.Since(first) < reapAfter {
			left[dead] = first
			continue
		}
		var status unix.WaitStatus
		if reaped, err := unix.Wait4(pid, &status, unix.WNOHANG, nil); err == nil && reaped == pid && isKnown {
			known.Ended(dead, status)
		}
	}
	return left
}

// Children lists the children of all threads of a process, a pid or "self" (proc_pid_task_children(5)).
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

// KillTree kills a child and its descendants whose parents still exist. It stops all before it kills
// any: a parent that ends drops its children from the tree, and one that runs starts others. The root
// dies last, so that the tree can be found again if this process dies.
func KillTree(root int) {
	stopped := make(map[int]bool)
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
			if stopped[pid] {
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
			stopped[pid], more = true, true
			pidfds = append(pidfds, pidfd)
			// It finishes a fork(2) before it stops; a hanging system call prevents that.
			for end := time.Now().Add(stopLimit); !HasStopped(pid) && time.Now().Before(end); {
				time.Sleep(stopPause)
			}
		}
	}
}

// HasStopped reports whether no thread of a process runs.
func HasStopped(pid int) bool {
	threads, _ := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid)) // none if it has ended
	for _, thread := range threads {
		id, _ := strconv.Atoi(thread.Name())
		// An uninterruptible sleep (D) may be in a fork.
		if stat, err := ReadStat(id); err == nil && !strings.Contains("TtZX", string(stat.State)) {
			return false
		}
	}
	return true
}

// descendants lists all that a process and its children have started.
func descendants(root int) (all []int) {
	for next := []int{root}; len(next) > 0; next = next[1:] {
		more := Children(strconv.Itoa(next[0]))
		all, next = append(all, more...), append(next, more...)
	}
	return all
}

// descends reports whether a process is root or its descendant, not one that got the pid meanwhile.
func descends(pid, root int) bool {
	for range 64 { // a bound, since processes may change on the way up
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
