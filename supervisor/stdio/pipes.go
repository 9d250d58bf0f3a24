package stdio

import (
	"fmt"
	"os"
	"sync"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/supervisor/api"
)

// Pipes are the streams of an exec: each output goes to the client that takes it.
type Pipes struct {
	mu       sync.Mutex
	stdin    *os.File            // write end or master; nil without or when closed
	terminal *os.File            // master; nil without
	outputs  map[string]*os.File // read ends that no pump has taken
	pumps    []*Pump
	ended    bool // the process has
}

// OpenPipes makes the streams of an exec without a terminal: of Options it reads Dir,
// Stdin and SELinux.
func OpenPipes(o Options) (*Pipes, Ends, error) {
	p, ends := NewTerminalPipes(), Ends{}
	err := p.open(o, &ends)
	if err != nil {
		p.Close()
		ends.Close()
		return nil, Ends{}, fmt.Errorf("open pipes: %w", err)
	}
	return p, ends, nil
}

func (p *Pipes) open(o Options, ends *Ends) (err error) {
	if p.outputs[api.Stdout], ends.Stdout, err = openPipe(o.Dir, o.SELinux); err != nil {
		return err
	}
	if p.outputs[api.Stderr], ends.Stderr, err = openPipe(o.Dir, o.SELinux); err != nil {
		return err
	}
	if o.Stdin {
		ends.Stdin, p.stdin, err = openPipe(o.Dir, o.SELinux)
	}
	return err
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

// Terminal is the terminal's master, nil without one.
func (p *Pipes) Terminal() *os.File { return p.terminal }

// Stdin is what the process reads, nil if it has none or it is closed.
func (p *Pipes) Stdin() *os.File {
	p.mu.Lock()
	defer p.mu.Unlock()
	return p.stdin
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
	pump := newPump(source, chunk{}, emit)
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

// CloseStdin ends the process's stdin.
func (p *Pipes) CloseStdin() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.stdin != nil && p.stdin != p.terminal {
		_ = p.stdin.Close()
	}
	p.stdin = nil
}

// Close closes what is open; pumps end at once.
func (p *Pipes) Close() {
	p.CloseStdin()
	p.mu.Lock()
	defer p.mu.Unlock()
	for _, source := range p.outputs {
		closeAll(source)
	}
	for _, pump := range p.pumps {
		_ = pump.Close()
	}
}
