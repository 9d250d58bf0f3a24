package runner

import (
	"errors"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

const (
	// mostAnswer is how much of what a plugin prints is kept in memory; one that prints
	// more is ended.
	mostAnswer = 4 << 20
	// mostStderr is how much is kept of the end of what it writes to stderr.
	mostStderr = 4 << 10
)

// output is one of a plugin's pipes, and what came out of it. It is read until the
// plugin has ended, not until the pipe does: a child that the plugin leaves behind may
// hold that for as long as it likes.
type output struct {
	reader, writer *os.File
	most           int
	// over ends the plugin when it has printed too much; nil to keep the last of it.
	over func()
	done chan struct{}

	mu      sync.Mutex
	text    []byte
	tooMuch bool
}

// open makes the pipe and returns the plugin's end.
func (o *output) open(most int, over func()) (*os.File, error) {
	var err error
	o.most, o.over, o.done = most, over, make(chan struct{})
	o.reader, o.writer, err = os.Pipe()
	return o.writer, err
}

// abandon is for a plugin that was not started.
func (o *output) abandon() {
	_, _ = o.reader.Close(), o.writer.Close() // nil is an error, too
}

// follow reads beside the plugin, until end.
func (o *output) follow() {
	_ = o.writer.Close() // the plugin has its own
	go func() {
		defer close(o.done)
		buffer := make([]byte, 32<<10)
		for {
			n, err := o.reader.Read(buffer)
			o.take(buffer[:n])
			if errors.Is(err, os.ErrDeadlineExceeded) {
				o.drain(buffer)
			}
			if err != nil {
				return
			}
		}
	}()
}

// drain takes what is in the pipe when the plugin has ended, and waits for nothing.
func (o *output) drain(buffer []byte) {
	raw, err := o.reader.SyscallConn()
	if err != nil {
		return
	}
	const mostReads = 64 // what is left may write faster than we read
	_ = raw.Control(func(fd uintptr) {
		for range mostReads {
			n, err := unix.Read(int(fd), buffer)
			if n <= 0 && !errors.Is(err, unix.EINTR) {
				return
			}
			o.take(buffer[:max(n, 0)])
		}
	})
}

func (o *output) take(text []byte) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.text = append(o.text, text...)
	if len(o.text) <= o.most {
		return
	}
	if o.over == nil {
		o.text = append(o.text[:0], o.text[len(o.text)-o.most:]...)
		return
	}
	o.text = o.text[:o.most]
	if !o.tooMuch {
		o.tooMuch = true
		o.over()
	}
}

// end returns what the plugin, which has ended, printed.
func (o *output) end() []byte {
	_ = o.reader.SetReadDeadline(time.Now()) // a pipe has deadlines
	<-o.done
	_ = o.reader.Close()
	return o.now()
}

// now is what the plugin has printed so far.
func (o *output) now() []byte {
	o.mu.Lock()
	defer o.mu.Unlock()
	return append([]byte(nil), o.text...)
}
