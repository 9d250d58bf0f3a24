package client

import (
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
)

// Output keeps what a container has written and its supervisor has not read: the
// kernel drops the content of a fifo that no process has open, and a supervisor
// that is killed and a container that ends are two. Nothing is read from it. (Its
// descriptors are none of Go's poller, which every write would wake.)
type Output struct{ fds []int }

// HoldOutput opens the fifos of a container of the supervisor that serves dir,
// as far as it has any.
func HoldOutput(dir, id string) *Output {
	o := &Output{}
	for _, stream := range []string{api.Stdout, api.Stderr} {
		fd, err := unix.Open(filepath.Join(dir, api.StreamDir, id+"."+stream), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err == nil {
			o.fds = append(o.fds, fd)
		}
	}
	return o
}

// Close is for an output that is in the log, or of no use. It may be called on
// nil, and again.
func (o *Output) Close() {
	if o == nil {
		return
	}
	for _, fd := range o.fds {
		_ = unix.Close(fd)
	}
	o.fds = nil
}
