package runtime

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// fifoFile is libcontainer's exec barrier, in the container's directory: init waits
// until somebody reads from it.
const fifoFile = "exec.fifo"

// openBarrier lets init through. It returns when init has said that it goes on.
func openBarrier(ctx context.Context, dir string, init *Process) error {
	path := filepath.Join(dir, fifoFile)
	fifo, err := os.OpenFile(path, os.O_RDONLY|unix.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("it was started before: %w", errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return fmt.Errorf("open the exec barrier: %w", err)
	}
	defer fifo.Close()
	ended, over := context.WithCancelCause(ctx)
	defer over(nil)
	go func() { // ends with init, or with ended
		if init.EndedBefore(ended) {
			over(errInitEnded)
		}
	}()
	defer context.AfterFunc(ended, func() { _ = fifo.SetReadDeadline(time.Now()) })()
	if err := readBarrier(fifo); err != nil {
		if cause := context.Cause(ended); cause != nil {
			err = cause
		}
		return fmt.Errorf("wait at the exec barrier: %w", err)
	}
	return os.Remove(path)
}

var errInitEnded = fmt.Errorf("the container's first process has ended: %w", errdefs.ErrFailedPrecondition)

// readBarrier reads the byte that init writes. Before it has opened the fifo there is
// nothing to read, which is no end yet: it comes, and wakes the poller (fifo(7)).
func readBarrier(fifo *os.File) error {
	raw, err := fifo.SyscallConn()
	if err != nil {
		return err
	}
	var failed error
	read := func(fd uintptr) bool {
		n, err := unix.Read(int(fd), make([]byte, 1))
		switch {
		case n > 0:
			return true
		case err == nil || errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EINTR):
			return false
		}
		failed = err
		return true
	}
	if err = raw.Read(read); err == nil {
		return failed
	}
	// A program that ends at once may be seen to have ended before its byte is read.
	var goneOn bool
	if raw.Control(func(fd uintptr) { goneOn = read(fd) }) == nil && goneOn {
		return failed
	}
	return err
}
