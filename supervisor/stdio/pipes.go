package stdio

import (
	"crypto/rand"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/selinux/go-selinux/label"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
)

// Pipes are the streams of an exec: each output goes to the client that takes it.
type Pipes struct {
	input                       // its mu guards what follows, too
	outputs map[string]*os.File // read ends that no pump has taken
	pumps   []*Pump
	ended   bool // the process has
}

// OpenPipes makes the streams of an exec without a terminal: of Options it reads Dir,
// Stdin and SELinux.
func OpenPipes(o Options) (*Pipes, Ends, error) {
	p, ends := NewTerminalPipes(), Ends{}
	var err error
	p.outputs[api.Stdout], ends[1], err = openPipe(o.Dir, o.SELinux)
	if err == nil {
		p.outputs[api.Stderr], ends[2], err = openPipe(o.Dir, o.SELinux)
	}
	if err == nil {
		ends[0], p.stdin, err = openPipe(o.Dir, o.SELinux)
	}
	if err != nil {
		p.Close()
		ends.Close()
		return nil, Ends{}, fmt.Errorf("open pipes: %w", err)
	}
	if !o.Stdin { // it is at its end
		p.CloseStdin()
	}
	return p, ends, nil
}

// NewTerminalPipes are the streams of an exec with a terminal, which
// TakeTerminal gives.
func NewTerminalPipes() *Pipes {
	return &Pipes{outputs: map[string]*os.File{}}
}

// TakeTerminal makes the master the source of output and the sink of input.
func (p *Pipes) TakeTerminal(master *os.File) {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.stdin, p.terminal, p.outputs[api.Stdout] = master, master, master
}

// Take makes a pump of an output that has none yet. The caller runs it:
// from now on AwaitOutput waits for it.
func (p *Pipes) Take(stream string, emit func([]byte)) (*Pump, error) {
	p.mu.Lock()
	defer p.mu.Unlock()
	source := p.outputs[stream]
	if source == nil {
		return nil, fmt.Errorf("stream %s: %w", stream, errdefs.ErrNotFound)
	}
	delete(p.outputs, stream)
	pump := newPump(source, emit)
	p.pumps = append(p.pumps, pump)
	if p.ended {
		pump.Finish()
	}
	return pump, nil
}

// Finish says that the process has ended: what is in the pipes still counts.
func (p *Pipes) Finish() {
	p.mu.Lock()
	defer p.mu.Unlock()
	p.ended = true
	for _, pump := range p.pumps {
		pump.Finish()
	}
}

// AwaitOutput returns when all that the process wrote is delivered.
func (p *Pipes) AwaitOutput() {
	p.mu.Lock()
	pumps := p.pumps
	p.mu.Unlock()
	for _, pump := range pumps {
		<-pump.Done()
	}
}

// Close closes what is open; pumps end at once.
func (p *Pipes) Close() {
	p.CloseStdin()
	p.mu.Lock()
	defer p.mu.Unlock()
	closeAll(slices.Collect(maps.Values(p.outputs))...)
	for _, pump := range p.pumps {
		_ = pump.Close()
	}
}

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
	path := fifoPath(dir, "pipe-"+rand.Text(), api.Stdout)
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
