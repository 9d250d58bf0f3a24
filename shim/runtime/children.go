package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"

	"golang.org/x/sys/unix"
)

// children knows which of our children have an owner, which waits for them by
// their pidfds. libcontainer's have one each, so that no child has to be searched
// when one ends: orphans of a container without a pid namespace of its own are
// reparented to the daemon, or to process 1. Only programs that start containers in
// the background need this process as the sub-reaper of what they start (adopt);
// then orphans come here, too, and are reaped: starting guards those whose owner is
// not known yet.
type children struct {
	signals  chan os.Signal
	starting sync.RWMutex // read-held while libcontainer starts, and waits for, helpers
	// lost is set when a start failed: libcontainer, or a limit, may have ended it
	// when the pid of its last child was not known yet.
	lost atomic.Bool

	mu     sync.Mutex
	owned  map[int]bool // others wait for these
	adopts bool
}

// newChildren continues to adopt where the build before was upgraded while it did.
func newChildren() *children {
	r := &children{signals: make(chan os.Signal, 1), owned: map[int]bool{}}
	var does int32
	if err := unix.Prctl(unix.PR_GET_CHILD_SUBREAPER, uintptr(unsafe.Pointer(&does)), 0, 0, 0); err == nil && does != 0 {
		r.adopt()
	}
	return r
}

// own runs start, which returns the pid that its caller will wait for.
func (r *children) own(start func() (int, error)) (int, error) {
	r.starting.RLock()
	pid, err := start()
	if err == nil {
		r.take(pid)
	}
	r.started(err)
	return pid, err
}

// during keeps from reaping while do runs helpers and waits for them itself.
func (r *children) during(do func() error) error {
	r.starting.RLock()
	err := do()
	r.started(err)
	return err
}

// started ends a start or a run of helpers, and has what it lost waited for.
func (r *children) started(err error) {
	if err != nil {
		r.lost.Store(true)
	}
	r.starting.RUnlock()
	r.poke()
	// Where others start something the last of them does it.
	if r.lost.Load() && r.starting.TryLock() {
		r.lost.Store(false)
		r.reapRest()
		r.starting.Unlock()
	}
}

// checkNew refuses a pid that another program reports, if it is no child of ours, or
// one that has an owner already.
func (r *children) checkNew(pid int) error {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.owned[pid] || !isChild(pid) {
		return fmt.Errorf("process %d is not one that it has started", pid)
	}
	return nil
}

// take makes a child one with an owner, and reports whether it had none.
func (r *children) take(pid int) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	had := r.owned[pid]
	r.owned[pid] = true
	return !had
}

// wait reaps a child for its owner.
func (r *children) wait(pid int) (status syscall.WaitStatus, known bool) {
	_, err := syscall.Wait4(pid, &status, 0, nil)
	for errors.Is(err, syscall.EINTR) {
		_, err = syscall.Wait4(pid, &status, 0, nil)
	}
	r.disown(pid)
	return status, err == nil
}

// lose makes a child one without an owner, which the end of the next start finds.
func (r *children) lose(pid int) {
	r.disown(pid)
	r.lost.Store(true)
}

// disown is called when the owner has waited.
func (r *children) disown(pid int) {
	r.mu.Lock()
	delete(r.owned, pid)
	r.mu.Unlock()
}

// reapRest waits for the children that have no owner: those that a failed start has
// lost, and those of the build before, when another one comes to serve in its
// process. They have ended, or were told to.
func (r *children) reapRest() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.adopts {
		return // run does
	}
	for _, pid := range listChildren() {
		if r.owned[pid] {
			continue
		}
		r.owned[pid] = true
		go func() { // ends with the child
			if p, err := openProcess(pid); err == nil {
				_ = p.Ended()
				_ = p.Close()
			}
			r.wait(pid)
		}()
	}
}

// adopt makes this process the parent of what its descendants orphan, from now on
// (PR_SET_CHILD_SUBREAPER(2const)).
func (r *children) adopt() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.adopts {
		return
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		slog.Error("processes that are left in the background are lost", "error", os.NewSyscallError("prctl", err)) // no kernel that we run on refuses it
	}
	r.adopts = true
	signal.Notify(r.signals, syscall.SIGCHLD)
}

// poke has orphans looked for.
func (r *children) poke() {
	r.mu.Lock()
	defer r.mu.Unlock()
	if !r.adopts {
		return
	}
	select {
	case r.signals <- syscall.SIGCHLD:
	default:
	}
}

// reapInterval is between two looks for orphans: the kernel walks all children for
// each, however many of them end at once.
const reapInterval = 20 * time.Millisecond

func (r *children) run(ctx context.Context) {
	defer signal.Stop(r.signals)
	r.poke() // some may have ended while this program was executed
	for {
		select {
		case <-ctx.Done():
			return
		case <-r.signals:
			r.reap()
		}
		select {
		case <-ctx.Done():
			return
		case <-time.After(reapInterval):
		}
	}
}

// reap skips a round while something starts; the end of the start pokes.
func (r *children) reap() {
	if !anyZombie() || !r.starting.TryLock() {
		return
	}
	defer r.starting.Unlock()
	for _, pid := range listChildren() {
		r.mu.Lock()
		owned := r.owned[pid]
		r.mu.Unlock()
		if !owned {
			_, _ = syscall.Wait4(pid, nil, syscall.WNOHANG, nil)
		}
	}
}

// anyZombie reports whether a child has ended that has not been waited for yet. Most
// have an owner that was faster, and to list all children takes far longer.
func anyZombie() bool {
	var info unix.Siginfo
	err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
	return err == nil && info.Signo != 0
}

// listChildren lists the children of all our threads, proc_pid_task(5).
func listChildren() []int {
	lists, _ := filepath.Glob("/proc/self/task/*/children")
	var pids []int
	for _, list := range lists {
		content, _ := os.ReadFile(list) // the thread may have ended
		for field := range strings.FieldsSeq(string(content)) {
			if pid, err := strconv.Atoi(field); err == nil {
				pids = append(pids, pid)
			}
		}
	}
	return pids
}
