package runtime

import (
	"errors"
	"fmt"
	"net"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
)

// launchLimit bounds the way to the barrier, some milliseconds of system calls: one
// of them may hang, on a dead mount for example.
const launchLimit = time.Minute

// use has abort end the launch from now on.
func (l *launching) use(ours net.Conn) error {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.ours = ours
	if l.aborted {
		return errAborted
	}
	return ours.SetDeadline(time.Now().Add(launchLimit))
}

// abort ends a launch that is under way, wherever its process is: the goroutine that
// waits for the process gets errAborted, and kills it.
func (l *launching) abort() {
	l.mu.Lock()
	defer l.mu.Unlock()
	l.aborted = true
	if l.ours != nil {
		_ = l.ours.SetDeadline(time.Now())
	}
}

// endLaunch is how long a process may take to end that was killed: one that is
// frozen, or in an uninterruptible sleep, ends when it can.
const endLaunch = time.Second

// errStillRuns says that a process of a launch that failed has not ended yet.
var errStillRuns = errors.New("its process still runs after SIGKILL")

// end kills the process, whose status says nothing new. One that does not end is left
// to be reaped as children without an owner are.
func (l *launching) end() error {
	if l.pid < 1 {
		return nil
	}
	_ = syscall.Kill(l.pid, syscall.SIGKILL)
	for deadline := time.Now().Add(endLaunch); ; time.Sleep(time.Millisecond) {
		pid, err := syscall.Wait4(l.pid, nil, syscall.WNOHANG, nil)
		if pid == l.pid || err != nil && !errors.Is(err, syscall.EINTR) {
			return nil
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("%w: %d", errStillRuns, l.pid)
		}
	}
}

// late is why the process has not come to the barrier when it is not waited for any
// longer.
func (l *launching) late() error {
	l.mu.Lock()
	defer l.mu.Unlock()
	if l.aborted {
		return errAborted
	}
	return fmt.Errorf("it is not at the exec barrier after %v: %w", launchLimit, errdefs.ErrUnavailable)
}
