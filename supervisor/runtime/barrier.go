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
	// For both, so that what has not opened it yet is no end.
	fifo, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
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

// readBarrier reads the byte that init writes. A program that ends at once may be seen to
// have ended before that.
func readBarrier(fifo *os.File) error {
	_, err := fifo.Read(make([]byte, 1))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		raw, rawErr := fifo.SyscallConn()
		if rawErr != nil {
			return rawErr
		}
		n := 0
		if rawErr := raw.Control(func(fd uintptr) { n, _ = unix.Read(int(fd), make([]byte, 1)) }); rawErr == nil && n > 0 {
			return nil
		}
	}
	return err
}
