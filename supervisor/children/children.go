package children

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
	"unsafe"

	"golang.org/x/sys/unix"
)

// Children are the children of this process.
type Children struct {
	signals chan os.Signal

	mu    sync.Mutex // held while a child is made, and while children are reaped
	owned map[int]*Child
}

// New makes this process the sub-reaper of what its descendants orphan
// (PR_SET_CHILD_SUBREAPER(2const)).
func New() (*Children, error) {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return nil, fmt.Errorf("become a sub-reaper: %w", os.NewSyscallError("prctl", err))
	}
	c := &Children{signals: make(chan os.Signal, 1), owned: make(map[int]*Child)}
	signal.Notify(c.signals, syscall.SIGCHLD)
	return c, nil
}

// Run reaps until ctx ends.
func (c *Children) Run(ctx context.Context) {
	defer signal.Stop(c.signals)
	for {
		c.reap()
		select {
		case <-ctx.Done():
			return
		case <-c.signals:
		}
	}
}

// reap waits for all children that have ended (wait(2)), the owned ones once what
// is to happen before that is done.
func (c *Children) reap() {
	for {
		var info unix.Siginfo
		err := unix.Waitid(unix.P_ALL, 0, &info, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if errors.Is(err, unix.EINTR) {
			continue
		}
		pid := int(sigchldPID(&info))
		if err != nil || pid == 0 {
			return
		}
		c.reapOne(pid)
	}
}

func (c *Children) reapOne(pid int) {
	c.mu.Lock()
	child := c.owned[pid]
	c.mu.Unlock()
	if child != nil && child.before != nil {
		child.before(pid)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	var status syscall.WaitStatus
	_, err := syscall.Wait4(pid, &status, 0, nil)
	for errors.Is(err, syscall.EINTR) {
		_, err = syscall.Wait4(pid, &status, 0, nil)
	}
	if child := c.owned[pid]; child != nil {
		delete(c.owned, pid)
		child.status = status
		close(child.exited)
	}
}

// sigchldPID is si_pid of a siginfo that waitid(2) has filled, 0 if no child has ended.
func sigchldPID(info *unix.Siginfo) int32 {
	if info.Signo == 0 {
		return 0
	}
	type sigchld struct {
		_   [3]int32 // si_signo, si_errno, si_code
		_   int32    // the union begins at a multiple of 8
		pid int32
	}
	return (*sigchld)(unsafe.Pointer(info)).pid
}

// Start owns the child that fork makes, or finds: nobody can reap it before. fork must
// not wait for the child.
func (c *Children) Start(fork func() (pid int, err error)) (*Child, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	pid, err := fork()
	if err != nil {
		return nil, err
	}
	return c.own(pid, nil)
}

// Own makes pid a child with an owner: a child of ours, or one of a child of ours
// that lives, whose end leaves pid to us.
//
// before, if any, is called when the child has ended and can still be looked at in
// /proc, before it is reaped. All other children wait for it.
func (c *Children) Own(pid int, before func(pid int)) (*Child, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.own(pid, before)
}

func (c *Children) own(pid int, before func(pid int)) (*Child, error) {
	if c.owned[pid] != nil {
		return nil, fmt.Errorf("process %d has an owner already", pid)
	}
	child := &Child{PID: pid, before: before, exited: make(chan struct{})}
	c.owned[pid] = child
	return child, nil
}

// Child is a child with an owner.
type Child struct {
	PID    int
	before func(pid int)
	exited chan struct{}
	status syscall.WaitStatus
}

// Exited is closed when the child has exited and is reaped. Until then its pid is
// no other process's.
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
