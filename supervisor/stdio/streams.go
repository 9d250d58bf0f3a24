// Package stdio moves the standard streams of containers: their output to their logs (package crilog) and
// to attached clients. It also holds their terminals and their stdin.
//
// A container waits for its log's disk, and for an attached client; a client that takes nothing for clientLimit is
// dropped.
//
// Locks: input.mu guards what a process reads; Fanout.mu guards the clients. Both are held for moments only and never
// together.
package stdio

import (
	"cmp"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/pipe"
	"github.com/minicri/minicri/supervisor/stdio/crilog"
)

// Streams is the supervisor's side of a container's standard streams. The daemon holds the output's fifos
// open too (client.Hold): when the supervisor dies, the container continues to write.
type Streams struct {
	log     *crilog.Log // nil: output is not logged
	outputs []*output
	input
}

type output struct {
	name    string
	pump    *Pump
	clients Fanout
	entries *crilog.Stream // nil: it is not logged
	spool   *spool         // nil without a log, and for a terminal, which ends with its supervisor
}

type input struct {
	mu       sync.Mutex
	stdin    *os.File // write end, or the master; nil without or when closed
	terminal *os.File // master; nil without
	slave    *os.File // see take
}

// take keeps the master of a terminal, and a slave (pipe.OpenSlave).
func (i *input) take(master *os.File) {
	i.terminal, i.stdin, i.slave = master, master, pipe.OpenSlave(master)
}

// hangUp lets a terminal go whose process has ended.
func (i *input) hangUp() {
	i.mu.Lock()
	defer i.mu.Unlock()
	socket.CloseAll(i.slave)
	i.slave = nil
}

// Terminal is the terminal's master, nil without one.
func (i *input) Terminal() *os.File { return i.terminal }

// Stdin is what the process reads, nil if it has none or it is closed.
func (i *input) Stdin() *os.File {
	i.mu.Lock()
	defer i.mu.Unlock()
	return i.stdin
}

// CloseStdin ends the process's stdin for good.
func (i *input) CloseStdin() {
	i.mu.Lock()
	defer i.mu.Unlock()
	if i.stdin != nil && i.stdin != i.terminal {
		_ = i.stdin.Close()
	}
	i.stdin = nil
}

// Options say which streams a container has.
type Options struct {
	Dir      string // where its fifos are; the container can reach what else is on the file system
	SpoolDir string // where its spools are; empty: Dir
	ID       string // the container's
	LogPath  string // CRI log; empty: output is discarded
	Terminal bool   // it makes a terminal, whose master is given to TakeTerminal
	Stdin    bool   // it reads a stdin
	SELinux  string // label of its files, which its streams get too; empty: none
	Bare     bool   // it has no streams
}

// Ends are the container's ends of stdin, stdout and stderr; nil where there is none.
type Ends [3]*os.File

// Close closes our copies of the ends.
func (e Ends) Close() { socket.CloseAll(e[:]...) }

func fifoPath(dir, id, stream string) string { return filepath.Join(dir, id+"."+stream) }

// Open makes the streams of a new container.
func Open(o Options) (*Streams, Ends, error) {
	s, ends := new(Streams), Ends{}
	if err := s.open(o, &ends); err != nil {
		s.Close()
		ends.Close()
		return nil, Ends{}, err
	}
	return s, ends, nil
}

func (s *Streams) open(o Options, ends *Ends) (err error) {
	if o.LogPath != "" {
		if s.log, err = crilog.Open(o.LogPath); err != nil {
			return err
		}
	}
	if o.Bare || o.Terminal {
		return nil
	}
	for i, stream := range map[int]string{1: api.Stdout, 2: api.Stderr} {
		source, err := pipe.MakeFifo(fifoPath(o.Dir, o.ID, stream), o.SELinux)
		if err != nil {
			return err
		}
		if err := s.readFifo(source, o, stream); err != nil {
			return err
		}
		if ends[i], err = pipe.Reopen(source, os.O_WRONLY); err != nil {
			return err
		}
	}
	if o.Stdin {
		if ends[0], s.stdin, err = pipe.Open(o.Dir, o.SELinux); err != nil {
			return fmt.Errorf("open a pipe for stdin: %w", err)
		}
	}
	return nil
}

// Adopt opens the streams of a container whose supervisor has died, except a terminal and an input, which end with it.
// What it returns with an error can be used.
func Adopt(o Options) (*Streams, error) {
	s := new(Streams)
	if o.Terminal || o.Bare {
		return s, nil
	}
	if o.LogPath != "" {
		s.log = crilog.Late(o.LogPath)
	}
	var errs []error
	for _, stream := range []string{api.Stdout, api.Stderr} {
		source, err := pipe.OpenFifo(fifoPath(o.Dir, o.ID, stream))
		if err == nil {
			err = s.readFifo(source, o, stream)
		}
		errs = append(errs, err)
	}
	return s, errors.Join(errs...)
}

// readFifo makes an output of a fifo, which it closes after an error.
func (s *Streams) readFifo(source *os.File, o Options, stream string) error {
	err := pipe.Awaitable(source)
	if err != nil {
		socket.CloseAll(source)
		return err
	}
	out := s.addOutput(stream, source)
	if s.log == nil {
		return nil
	}
	out.spool, err = openSpool(fifoPath(cmp.Or(o.SpoolDir, o.Dir), o.ID, stream) + spoolSuffix)
	out.spool.entries = out.entries
	out.entries.Progress = out.spool.logging
	out.pump.read = out.spool.read
	return err
}

func (s *Streams) addOutput(stream string, source *os.File) *output {
	out := &output{name: stream, clients: Fanout{clients: make(map[chan []byte]bool)}}
	if s.log != nil {
		out.entries = s.log.Stream(stream)
	}
	out.pump = newPump(source, func(p []byte) {
		if out.entries != nil {
			_, _ = out.entries.Write(p) // never fails
		}
		out.spool.logged()
		out.clients.emit(p)
	})
	s.outputs = append(s.outputs, out)
	return out
}

// TakeTerminal makes the master the source of output, which moves from now on, and the sink of input.
func (s *Streams) TakeTerminal(master *os.File) {
	s.take(master)
	go s.addOutput(api.Stdout, master).pump.Run()
}

// Run starts moving bytes.
func (s *Streams) Run() {
	for _, out := range s.outputs {
		go out.pump.Run()
	}
}

// shortagePause is how long a log that has no room or no descriptor waits before it is tried again.
const shortagePause = time.Second

// Resume runs streams that were adopted. Once the log is open, it first gets what the predecessor has left:
// a disk that hangs holds up that container's output alone. report gets what is lost, or comes late.
func (s *Streams) Resume(report func(error)) {
	if s.log == nil {
		s.Run()
		return
	}
	go func() {
		err := s.log.Reopen()
		for ; IsShortage(err); err = s.log.Reopen() {
			report(err)
			time.Sleep(shortagePause)
		}
		outputs := slices.Clone(s.outputs)
		if last := len(outputs) - 1; last > 0 && outputs[last].spool.begun() {
			slices.Reverse(outputs) // first what cut off half an entry: nothing may be appended to that
		}
		for _, out := range outputs {
			err = errors.Join(err, out.spool.resume(s.log, out.name))
		}
		if err != nil {
			report(err)
		}
		s.Run()
	}()
}

// IsShortage reports a lack of descriptors or memory, which says nothing of a container.
func IsShortage(err error) bool {
	return errors.Is(err, unix.EMFILE) || errors.Is(err, unix.ENFILE) || errors.Is(err, unix.ENOMEM)
}

// Drain ends the streams after the process has ended, with all that it wrote.
func (s *Streams) Drain() {
	for _, out := range s.outputs {
		out.clients.hurry.Store(true)
		out.pump.Finish()
	}
	for _, out := range s.outputs {
		<-out.pump.Done()
		if out.entries != nil {
			out.entries.Flush()
		}
		out.spool.logged()
		out.clients.end()
	}
	s.Close()
}

// Output is what copies a stream to attached clients; nil if there is no such stream.
func (s *Streams) Output(stream string) *Fanout {
	for _, out := range s.outputs {
		if out.name == stream {
			return &out.clients
		}
	}
	return nil
}

// ReopenLog continues in a new file at the log's path. On nil it does nothing.
func (s *Streams) ReopenLog() error {
	if s == nil || s.log == nil {
		return nil
	}
	return s.log.Reopen()
}

// Close is for streams that do not run (any more).
func (s *Streams) Close() {
	s.CloseStdin()
	s.hangUp()
	for _, out := range s.outputs {
		_ = out.pump.Close()
		out.spool.close()
	}
	if s.log != nil {
		_ = s.log.Close()
	}
}

const spoolSuffix = ".spool" // of the name of a fifo

// HasFifos reports whether RemoveFifos has yet to remove what Open has made.
func (o Options) HasFifos() bool {
	_, err := os.Lstat(fifoPath(o.Dir, o.ID, api.Stdout)) // the first that is removed
	return !errors.Is(err, os.ErrNotExist)
}

// RemoveFifos removes what Open has made, or pipe.Open.
func (o Options) RemoveFifos() (errs error) {
	for _, path := range []string{
		fifoPath(o.Dir, o.ID, api.Stdout), fifoPath(o.Dir, o.ID, api.Stderr),
		fifoPath(cmp.Or(o.SpoolDir, o.Dir), o.ID, api.Stdout) + spoolSuffix,
		fifoPath(cmp.Or(o.SpoolDir, o.Dir), o.ID, api.Stderr) + spoolSuffix,
	} {
		if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = errors.Join(errs, err)
		}
	}
	return errs
}

// Fanout sends a container's output to attached clients, which share what they have not read yet.
type Fanout struct {
	mu      sync.Mutex
	clients map[chan []byte]bool // whether the container waits for the client
	ended   bool
	hurry   atomic.Bool // the container has ended: emit waits for nobody, as what was written fits
}

// emit hands p itself to all clients.
func (f *Fanout) emit(p []byte) {
	for began := time.Now(); !f.send(p, began); {
		time.Sleep(clientPause)
	}
}

// send gives p to all clients. It returns false, and does nothing, while the container has to wait for one that is far
// behind. A client is dropped if the container does not wait for it, or has waited for clientLimit.
func (f *Fanout) send(p []byte, since time.Time) bool {
	f.mu.Lock()
	defer f.mu.Unlock()
	for client, waits := range f.clients {
		if waits && len(client) >= cap(client)/2 && !f.hurry.Load() {
			if time.Since(since) < clientLimit {
				return false
			}
			f.drop(client)
			for range client { // it may never read the rest
			}
		}
	}
	for client := range f.clients {
		select {
		case client <- p:
		default:
			f.drop(client)
			for range client {
			}
		}
	}
	return true
}

const (
	clientLimit = 10 * time.Second     // of a container's wait for an attached client, which the daemon gives up before
	clientPause = 5 * time.Millisecond // between two looks whether it has caught up
)

// Attach returns the output from now on, for a client that the container waits for or not. The channel is closed at the
// end of the output, or when the client is dropped.
func (f *Fanout) Attach(waits bool) chan []byte {
	client := make(chan []byte, 64)
	f.mu.Lock()
	defer f.mu.Unlock()
	f.clients[client] = waits
	if f.ended {
		f.drop(client)
	}
	return client
}

// Detach ends what Attach returned.
func (f *Fanout) Detach(client chan []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.drop(client)
}

func (f *Fanout) end() {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.ended = true
	for client := range f.clients {
		f.drop(client)
	}
}

// drop needs mu.
func (f *Fanout) drop(client chan []byte) {
	if _, is := f.clients[client]; is {
		delete(f.clients, client)
		close(client)
	}
}

// MasterLimit bounds the wait for a terminal's master, which is sent before the barrier.
const MasterLimit = time.Second

// ReceiveMaster takes the terminal's master, which init sends before the barrier, out of the socket. The
// sender may be a program of the node's administrator: all but one master of a pseudo-terminal is refused.
func ReceiveMaster(from *net.UnixConn) (*os.File, error) {
	if err := from.SetReadDeadline(time.Now().Add(MasterLimit)); err != nil {
		return nil, fmt.Errorf("receive the terminal: %w", err)
	}
	// Room for a second descriptor shows that more than one was sent.
	fds, err := socket.Receive(from, make([]byte, 4096), 2)
	if err == nil && len(fds) != 1 {
		err = fmt.Errorf("%d descriptors or more were sent, not one", len(fds))
	}
	if err == nil {
		_, err = unix.IoctlGetUint32(fds[0], unix.TIOCGPTN) // of nothing but a master
	}
	if err == nil {
		err = unix.SetNonblock(fds[0], true) // for deadlines
	}
	if err != nil {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		return nil, fmt.Errorf("receive the terminal: %w", err)
	}
	master := os.NewFile(uintptr(fds[0]), "terminal")
	if err = pipe.Awaitable(master); err != nil {
		return nil, errors.Join(err, master.Close())
	}
	return master, nil
}
