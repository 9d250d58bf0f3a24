package process

import (
	"context"
	"fmt"
	"os"
	"os/signal"
	"sync"
	"syscall"
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

// Start owns the child that fork makes, or finds, before it is reaped. fork must not wait for the child.
func (p *Parent) Start(fork func() (pid int, err error)) (*Child, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	pid, err := fork()
	if err != nil {
		return nil, err
	}
	return p.own(pid, nil)
}

// Own makes pid a child with an owner: our child, or that of a living child of ours, which leaves it to us.
// before, if any, is called when the child has ended, before it is reaped. All other children wait for it.
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
