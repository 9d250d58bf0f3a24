package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	"github.com/opencontainers/runc/libcontainer"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/stdio/crilog"
)

// stdio is the shim's side of a container's standard streams. Output goes
// through named fifos that the container holds open for reading too: when the
// shim dies, the container can go on writing, and the next shim reads on.
type stdio struct {
	log      *crilog.Log // nil: output is not logged
	pumps    []*pump
	flushes  []func()           // one per pump: logs an unfinished last line
	fans     map[string]*fanout // by stream name
	terminal *os.File           // master; nil without

	mu    sync.Mutex
	stdin *os.File // write end, or the master; nil without or when closed
}

func fifoPath(dir, id, stream string) string {
	return filepath.Join(dir, "io", id+"."+stream)
}

// openStdio makes the streams of a new container. childEnds closes the ends
// that process has taken, whether it was started or not.
func openStdio(dir string, request *api.CreateRequest, terminal bool, process *libcontainer.Process) (io *stdio, childEnds func(), err error) {
	io = &stdio{fans: map[string]*fanout{}}
	var ends []*os.File
	childEnds = func() { closeAll(ends) }
	if request.LogPath != "" {
		if io.log, err = crilog.Open(request.LogPath); err != nil {
			return nil, nil, err
		}
	}
	if terminal {
		return io, childEnds, nil
	}
	for _, stream := range []string{api.Stdout, api.Stderr} {
		end, err := io.openFifo(dir, request.Id, stream)
		if err != nil {
			io.close()
			childEnds()
			return nil, nil, err
		}
		ends = append(ends, end)
	}
	process.Stdout, process.Stderr = ends[0], ends[1]
	if request.Stdin {
		read, write, err := os.Pipe()
		if err != nil {
			io.close()
			childEnds()
			return nil, nil, fmt.Errorf("stdin: %w", err)
		}
		ends = append(ends, read)
		process.Stdin, io.stdin = read, write
	}
	return io, childEnds, nil
}

// openFifo makes a fifo and its pump, and returns the container's end.
func (io *stdio) openFifo(dir, id, stream string) (*os.File, error) {
	path := fifoPath(dir, id, stream)
	if err := unix.Mkfifo(path, 0o600); err != nil {
		return nil, fmt.Errorf("fifo %s: %w", path, err)
	}
	if err := io.readFifo(dir, id, stream); err != nil {
		return nil, err
	}
	return os.OpenFile(path, os.O_RDWR, 0)
}

func (io *stdio) readFifo(dir, id, stream string) error {
	source, err := os.OpenFile(fifoPath(dir, id, stream), os.O_RDONLY|unix.O_NONBLOCK, 0)
	if err != nil {
		return err
	}
	io.addPump(stream, source)
	return nil
}

// addPump moves a stream to the log and to who is attached.
func (io *stdio) addPump(stream string, source *os.File) {
	fan := newFanout()
	io.fans[stream] = fan
	emit, flush := fan.emit, func() {}
	if io.log != nil {
		entries := io.log.Stream(stream)
		flush = entries.Flush
		emit = func(p []byte) {
			_, _ = entries.Write(p) // never fails
			fan.emit(p)
		}
	}
	io.pumps = append(io.pumps, newPump(source, emit))
	io.flushes = append(io.flushes, flush)
}

// takeTerminal makes the master the source of output and the sink of input.
func (io *stdio) takeTerminal(master *os.File) {
	io.terminal, io.stdin = master, master
	io.addPump(api.Stdout, master)
}

// run starts moving bytes.
func (io *stdio) run() {
	for _, p := range io.pumps {
		go p.run()
	}
}

// drain ends the streams after the process has ended, with all that it wrote.
func (io *stdio) drain() {
	for _, p := range io.pumps {
		p.finish()
	}
	for i, p := range io.pumps {
		<-p.done
		io.flushes[i]()
	}
	for _, fan := range io.fans {
		fan.end()
	}
	io.close()
}

func (io *stdio) closeStdin() {
	io.mu.Lock()
	defer io.mu.Unlock()
	if io.stdin != nil && io.stdin != io.terminal {
		_ = io.stdin.Close()
	}
	io.stdin = nil
}

// close is for streams that do not run (any more).
func (io *stdio) close() {
	io.closeStdin()
	for _, p := range io.pumps {
		_ = p.source.Close()
	}
	if io.log != nil {
		_ = io.log.Close()
	}
}

func removeFifos(dir, id string) error {
	var errs []error
	for _, stream := range []string{api.Stdout, api.Stderr} {
		if err := os.Remove(fifoPath(dir, id, stream)); err != nil && !errors.Is(err, os.ErrNotExist) {
			errs = append(errs, err)
		}
	}
	return errors.Join(errs...)
}

func closeAll(files []*os.File) {
	for _, f := range files {
		_ = f.Close()
	}
}
