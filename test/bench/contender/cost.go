package contender

import (
	"errors"
	"io/fs"
	"syscall"
	"time"
)

// CPU is what the daemon and all its shims have used: not what their
// containers have.
func (n *Node) CPU() (time.Duration, error) { return n.cpu(CPU) }

// CPUWithChildren is CPU with that of processes which have ended: helpers that
// set containers up, and the containers.
func (n *Node) CPUWithChildren() (time.Duration, error) { return n.cpu(CPUWithChildren) }

func (n *Node) cpu(of func(pid int) (time.Duration, error)) (sum time.Duration, err error) {
	shims, err := named(n.shim)
	if err != nil {
		return 0, err
	}
	if sum, err = of(n.PID); err != nil {
		return 0, err
	}
	for _, pid := range shims {
		cpu, err := of(pid)
		if ended(err) {
			continue // it was there to start pause
		}
		if err != nil {
			return 0, err
		}
		sum += cpu
	}
	return sum, nil
}

// ended reports whether /proc has no such process any more.
func ended(err error) bool {
	return errors.Is(err, fs.ErrNotExist) || errors.Is(err, syscall.ESRCH)
}
