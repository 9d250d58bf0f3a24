package stdio

import (
	"crypto/rand"
	"errors"
	"fmt"
	"os"

	"golang.org/x/sys/unix"

	"github.com/opencontainers/selinux/go-selinux/label"

	"github.com/minicri/minicri/supervisor/api"
)

// openPipe is os.Pipe for a container whose files have the SELinux label, "" for
// none. A pipe has the label of the process that makes it, with all its categories,
// and at execve SELinux closes what the container's domain may not use: a fifo in dir,
// which is a file as any other, takes its place. Its name is gone on return; what a
// supervisor that was killed leaves has the form of a container's, of which there is
// no record.
func openPipe(dir, selinux string) (r, w *os.File, err error) {
	if selinux == "" {
		return os.Pipe()
	}
	path := fifoPath(dir, "pipe-"+rand.Text(), api.Stdin)
	if err := makeFifo(path, selinux); err != nil {
		return nil, nil, err
	}
	// While one has it open for both, neither open waits for the other end. Without
	// O_NONBLOCK: the container would have it, too.
	both, err := os.OpenFile(path, os.O_RDWR, 0)
	if err == nil {
		r, err = os.OpenFile(path, os.O_RDONLY, 0)
	}
	if err == nil {
		w, err = os.OpenFile(path, os.O_WRONLY, 0)
	}
	closeAll(both)
	if err = errors.Join(err, os.Remove(path)); err != nil {
		closeAll(r, w)
		return nil, nil, err
	}
	return r, w, nil
}

// makeFifo makes a fifo that has the SELinux label, unless it is "".
func makeFifo(path, selinux string) error {
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return fmt.Errorf("fifo %s: %w", path, err)
	}
	if err := label.SetFileLabel(path, selinux); err != nil {
		return errors.Join(fmt.Errorf("label fifo %s: %w", path, err), os.Remove(path))
	}
	return nil
}
