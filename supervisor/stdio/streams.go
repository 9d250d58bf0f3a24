package stdio

import (
	"bytes"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"sync"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/stdio/crilog"
	"github.com/minicri/minicri/supervisor/stdio/journal"
)

// Streams is the supervisor's side of a container's standard streams. Output
// goes through named fifos, of which the daemon holds a read end too
// (client.HoldOutput): when the supervisor dies, the container can continue to write,
// and the next one continues to read.
type Streams struct {
	log     *crilog.Log // nil: output is not logged
	journal *journal.Journal
	id      string
	pumps   []*Pump
	flushes []func()           // one per pump: logs an unfinished last line
	fans    map[string]*Fanout // by stream name
	input
}

// input is what a process reads.
type input struct {
	mu       sync.Mutex
	stdin    *os.File // write end, or the master; nil without or when closed
	terminal *os.File // master; nil without
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
	Dir      string // where its fifos are
	ID       string // the container's
	LogPath  string // CRI log; empty: output is discarded
	Terminal bool   // it makes a terminal, whose master is given to TakeTerminal
	Stdin    bool   // it reads a stdin
	SELinux  string // label of its files, which its streams get too; empty: none
	Bare     bool   // it has no streams
	Journal  *journal.Journal
}

// Ends are the container's ends of its streams; nil where there is none.
type Ends struct{ Stdin, Stdout, Stderr *os.File }

// Close closes our copies of them, whether the container was started or not.
func (e Ends) Close() { closeAll(e.Stdin, e.Stdout, e.Stderr) }

func fifoPath(dir, id, stream string) string { return filepath.Join(dir, id+"."+stream) }

func newStreams(o Options) *Streams {
	return &Streams{fans: map[string]*Fanout{}, journal: o.Journal, id: o.ID}
}

// Open makes the streams of a new container.
func Open(o Options) (*Streams, Ends, error) {
	s, ends := newStreams(o), Ends{}
	err := s.open(o, &ends)
	if err != nil {
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
	if err := s.openOutputs(o, ends); err != nil {
		return err
	}
	if o.Stdin {
		if ends.Stdin, s.stdin, err = openPipe(o.Dir, o.SELinux); err != nil {
			return fmt.Errorf("stdin: %w", err)
		}
	}
	return nil
}

// openOutputs makes the fifos and their pumps, and opens the container's ends.
func (s *Streams) openOutputs(o Options, ends *Ends) (err error) {
	for _, stream := range []string{api.Stdout, api.Stderr} {
		if err := s.openFifo(o, stream); err != nil {
			return err
		}
	}
	if ends.Stdout, err = os.OpenFile(fifoPath(o.Dir, o.ID, api.Stdout), os.O_WRONLY, 0); err != nil {
		return err
	}
	ends.Stderr, err = os.OpenFile(fifoPath(o.Dir, o.ID, api.Stderr), os.O_WRONLY, 0)
	return err
}

// openFifo makes a fifo and its pump.
func (s *Streams) openFifo(o Options, stream string) error {
	// At execve SELinux closes what the container's domain may not use; the label
	// of /run is not for it.
	if err := makeFifo(fifoPath(o.Dir, o.ID, stream), o.SELinux); err != nil {
		return err
	}
	return s.readFifo(o, stream)
}

func (s *Streams) readFifo(o Options, stream string) error {
	source, err := os.OpenFile(fifoPath(o.Dir, o.ID, stream), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	return s.addPump(stream, source)
}

// Adopt opens the streams of a container whose supervisor has died. Those that it
// returns with an error can be used; the error says what is lost, or comes late. A
// terminal and an input are lost with their supervisor.
func Adopt(o Options) (*Streams, error) {
	s := newStreams(o)
	if o.Terminal || o.Bare {
		return s, nil
	}
	var errs []error
	if o.LogPath != "" {
		var err error
		if s.log, err = crilog.Open(o.LogPath); err != nil {
			s.log = crilog.Late(o.LogPath, err)
			errs = append(errs, err)
		}
	}
	for _, stream := range []string{api.Stdout, api.Stderr} {
		errs = append(errs, s.readFifo(o, stream))
	}
	return s, errors.Join(errs...)
}

// addPump moves a stream to the log and to attached clients. The error says what
// a predecessor has left and is lost.
func (s *Streams) addPump(stream string, source *os.File) (err error) {
	fan := &Fanout{clients: map[chan []byte]bool{}}
	s.fans[stream] = fan
	if s.log == nil {
		s.pumps, s.flushes = append(s.pumps, newPump(source, chunk{}, fan.emit)), append(s.flushes, func() {})
		return nil
	}
	memory := &journaled{journal: s.journal, owner: s.id + "." + stream, whole: source != nil && source == s.terminal}
	memory.entries = s.log.Stream(stream, memory)
	err = memory.resume(s.log, stream)
	s.pumps = append(s.pumps, newPump(source, memory, func(p []byte) {
		_, _ = memory.entries.Write(p) // never fails
		fan.emit(p)
	}))
	s.flushes = append(s.flushes, memory.flush)
	return err
}

// TakeTerminal makes the master the source of output, which moves from then on, and the
// sink of input.
func (s *Streams) TakeTerminal(master *os.File) error {
	s.terminal, s.stdin = master, master
	err := s.addPump(api.Stdout, master)
	go s.pumps[0].Run()
	return err
}

// Run starts moving bytes.
func (s *Streams) Run() {
	for _, p := range s.pumps {
		go p.Run()
	}
}

// Drain ends the streams after the process has ended, with all that it wrote.
func (s *Streams) Drain() {
	for _, p := range s.pumps {
		p.Finish()
	}
	for i, p := range s.pumps {
		<-p.Done()
		s.flushes[i]()
	}
	for _, fan := range s.fans {
		fan.end()
	}
	s.Close()
}

// Output is what copies a stream to attached clients; nil if there is no such
// stream.
func (s *Streams) Output(stream string) *Fanout { return s.fans[stream] }

// ReopenLog continues in a new file at the log's path.
func (s *Streams) ReopenLog() error {
	if s.log == nil {
		return nil
	}
	return s.log.Reopen()
}

// Close is for streams that do not run (any more).
func (s *Streams) Close() {
	s.CloseStdin()
	for _, p := range s.pumps {
		_ = p.Close()
	}
	if s.log != nil {
		_ = s.log.Close()
	}
}

// RemoveFifos removes what Open has made in dir, or openPipe.
func RemoveFifos(dir, id string) error {
	var errs []error
	for _, stream := range []string{api.Stdin, api.Stdout, api.Stderr} {
		if err := os.Remove(fifoPath(dir, id, stream)); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func closeAll(files ...*os.File) {
	for _, f := range files {
		if f != nil {
			_ = f.Close()
		}
	}
}

// fanoutBacklog is how many chunks (pumpBuffer bytes at most) an attached
// client may be behind before it is dropped: the container never waits for it.
const fanoutBacklog = 32

// Fanout copies a container's output to attached clients.
type Fanout struct {
	mu      sync.Mutex
	clients map[chan []byte]bool
	ended   bool
}

func (f *Fanout) emit(p []byte) {
	f.mu.Lock()
	defer f.mu.Unlock()
	for client := range f.clients {
		select {
		case client <- bytes.Clone(p):
		default:
			f.drop(client)
		}
	}
}

// Attach returns the output from now on; closed at its end, or when the client
// is too slow.
func (f *Fanout) Attach() chan []byte {
	client := make(chan []byte, fanoutBacklog)
	f.mu.Lock()
	defer f.mu.Unlock()
	if f.ended {
		close(client)
		return client
	}
	f.clients[client] = true
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
	if f.clients[client] {
		delete(f.clients, client)
		close(client)
	}
}

// chunk is the memory of a pump for one move: a stream that is silent holds none.
type chunk struct{}

func (chunk) take(pending int) []byte { return make([]byte, min(max(pending, 1), pumpBuffer)) }
func (chunk) have(int)                {}
func (chunk) moved()                  {}

// masterLimit is how long a terminal's master may take that is on its way.
const masterLimit = time.Second

// ReceiveMaster takes the terminal's master out of the socket. Init has sent
// it by the time that it is at the barrier. Who sends it may be a program of the
// node's administrator: what is not one master of a pseudo-terminal is refused.
func ReceiveMaster(from *net.UnixConn) (*os.File, error) {
	if err := from.SetReadDeadline(time.Now().Add(masterLimit)); err != nil {
		return nil, fmt.Errorf("receive the terminal: %w", err)
	}
	// There is room for a second descriptor, so two are seen to be no one.
	fds, err := socket.Receive(from, make([]byte, 4096), 2)
	if err == nil && len(fds) != 1 {
		err = fmt.Errorf("%d descriptors or more were sent, not one", len(fds))
	}
	if err == nil {
		if _, e := unix.IoctlGetUint32(fds[0], unix.TIOCGPTN); e != nil {
			err = fmt.Errorf("what was sent is no master of a pseudo-terminal: %w", os.NewSyscallError("ioctl(TIOCGPTN)", e))
		}
	}
	if err == nil {
		err = os.NewSyscallError("fcntl", unix.SetNonblock(fds[0], true)) // for deadlines
	}
	if err != nil {
		for _, fd := range fds {
			_ = unix.Close(fd)
		}
		return nil, fmt.Errorf("receive the terminal: %w", err)
	}
	return os.NewFile(uintptr(fds[0]), "terminal"), nil
}

// Resize sets a terminal's size, ioctl_tty(2).
func Resize(master *os.File, width, height uint32) error {
	raw, err := master.SyscallConn()
	if err != nil {
		return err
	}
	var ioctlErr error
	err = raw.Control(func(fd uintptr) {
		ioctlErr = unix.IoctlSetWinsize(int(fd), unix.TIOCSWINSZ, &unix.Winsize{Row: uint16(height), Col: uint16(width)})
	})
	return errors.Join(err, ioctlErr)
}
