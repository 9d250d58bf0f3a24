package serve

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/supervisor/stdio"
)

// proc is a process of a container: our child, or that of an earlier supervisor.
type proc struct {
	process.Facts
	terminal *os.File         // the terminal's master; nil without one
	found    *process.Process // nil for one that had ended before it was found
	child    *process.Child   // nil: it is not ours
	starter  *process.Child   // the starter that made it, and is its parent until it ends; nil without one
}

// findProc finds a process that is not our child. It is no error if the process has ended.
func findProc(facts process.Facts) (*proc, error) {
	found, err := process.Find(facts.PID)
	if err == nil && found.Facts == facts {
		return &proc{Facts: facts, found: found}, nil
	}
	if err == nil {
		err = found.Close()
	} else if errors.Is(err, process.ErrGone) {
		err = nil
	}
	return &proc{Facts: facts}, err
}

func procOf(l *launch.Launched) *proc {
	return &proc{Facts: l.Process.Facts, found: l.Process, child: l.Child}
}

// startByStarter has a starter make a process. ended, if any, is called between its end and its reaping. made, if any, is
// called while the starter still lives: an error, or the supervisor's death before it returns, ends the process.
func (c *container) startByStarter(
	ctx context.Context, request starter.Request, ends stdio.Ends, ended func(pid int), made func(process.Facts) error,
) (p *proc, answer starter.Answer, err error) {
	var files []*os.File
	for i, file := range ends {
		if file != nil {
			request.Streams[i] = true
			files = append(files, file)
		}
	}
	var console *net.UnixConn
	if request.Terminal {
		ours, theirs, err := socket.Pair()
		if err != nil {
			return nil, answer, err
		}
		defer ours.Close()
		defer theirs.Close()
		console, files = ours, append(files, theirs)
	}
	err = c.sup.starters.Run(ctx, request, files, func(given starter.Answer, by *process.Child) error {
		found, err := process.Find(given.PID)
		if err != nil {
			return err
		}
		answer, p = given, &proc{Facts: found.Facts, found: found, starter: by}
		if p.child, err = c.sup.parent.Own(given.PID, ended); err == nil && console != nil {
			p.terminal, err = stdio.ReceiveMaster(console)
		}
		if err == nil && made != nil {
			err = made(found.Facts)
		}
		return err
	})
	if err != nil && p != nil {
		_ = p.terminal.Close() // nil does nothing
		return nil, answer, errors.Join(err, p.close())
	}
	return p, answer, err
}

// awaitStarter returns when the starter that made the process has ended, and is no longer its parent: the program may ask
// for a signal when its parent ends.
func (p *proc) awaitStarter(ctx context.Context) error {
	if p.starter == nil {
		return nil
	}
	select {
	case <-p.starter.Exited():
		return nil
	case <-ctx.Done():
		return fmt.Errorf("the starter that made the first process has not ended: %w", context.Cause(ctx))
	}
}

// gone reports whether the process had ended before it was found.
func (p *proc) gone() bool { return p.found == nil }

func (p *proc) signal(sig syscall.Signal) error {
	if p.gone() {
		return os.ErrProcessDone
	}
	return p.found.Signal(sig)
}

// awaitEnd returns when the process has ended. It does not reap it.
func (p *proc) awaitEnd() {
	if !p.gone() {
		_ = p.found.Wait()
	}
}

func (p *proc) wait() (status syscall.WaitStatus, known bool) {
	if p.child == nil {
		return 0, false
	}
	return p.child.Wait(), true
}

// exiting reports whether the process is ending or has ended, so that its namespaces may be gone, and if it is reaped.
func (p *proc) exiting() (exiting, reaped bool) {
	stat, err := process.ReadStat(p.PID)
	reaped = errors.Is(err, process.ErrGone) || err == nil && stat.StartTime != p.StartTime
	if !reaped && err == nil && stat.Exiting {
		_, err = process.LiveThread(p.PID)
	}
	return reaped || errors.Is(err, process.ErrGone), reaped
}

// kernelExit returns the status of a reaped process that is not our child, if the kernel tells it.
func (p *proc) kernelExit() (syscall.WaitStatus, bool) {
	if p.gone() {
		return 0, false
	}
	status, known := p.found.KernelExit()
	return syscall.WaitStatus(status), known
}

// close releases what is held for the process, which lives on if it has not ended.
func (p *proc) close() error {
	if p.gone() {
		return nil
	}
	return p.found.Close()
}

// openBarrier opens the barrier, where init waits for a reader, and returns when init has passed. running ends with init.
func openBarrier(ctx, running context.Context, dir string) error {
	path := filepath.Join(dir, launch.FIFOFile)
	// Opened for reading and writing: a fifo without a writer reads as ended.
	fifo, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("it was started before: %w", errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return fmt.Errorf("open the exec barrier: %w", err)
	}
	defer fifo.Close()
	giveUp := func() { _ = fifo.SetReadDeadline(time.Now()) }
	defer context.AfterFunc(ctx, giveUp)()
	defer context.AfterFunc(running, giveUp)()
	if err := readBarrier(fifo); err != nil {
		if cause := errors.Join(context.Cause(ctx), context.Cause(running)); cause != nil {
			err = cause
		}
		return fmt.Errorf("wait at the exec barrier: %w", err)
	}
	_ = os.Remove(path) // the program runs; the record says that it was started
	return nil
}

var errInitEnded = fmt.Errorf("the container's first process has ended: %w", errdefs.ErrFailedPrecondition)

// readBarrier reads the byte that init writes, even if a program that ends at once is seen to end first.
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

// listenToInit keeps what init writes to standard error before the program runs: why it cannot run.
func (c *container) listenToInit() {
	stream := api.Stderr
	if c.record.Terminal {
		stream = api.Stdout
	}
	said := c.streams().Output(stream)
	c.mu.Lock()
	defer c.mu.Unlock()
	if said != nil && c.initWords == nil { // else it has listened since an earlier start, which failed
		c.initSays, c.initWords = said, said.Attach(false)
	}
}

// ignoreInit returns what init has said, and keeps nothing more: a loud program would fill the memory.
func (c *container) ignoreInit() (said []byte) {
	c.mu.Lock()
	says, words := c.initSays, c.initWords
	c.initWords = nil
	c.mu.Unlock()
	if words == nil {
		return nil
	}
	says.Detach(words)
	for chunk := range words {
		said = append(said, chunk...)
	}
	return said
}

// awaitProgram returns when the program runs, or has run, 0.1 ms after the barrier; an error if init ended.
func (c *container) awaitProgram(ctx context.Context) error {
	over := ctx.Done()
	const first, most = 20 * time.Microsecond, 10 * time.Millisecond // between two looks
	for pause := first; ; pause = min(2*pause, most) {
		waits, err := beforeExec(c.init.PID)
		if err != nil { // it has been waited for
			c.mu.Lock()
			waits = c.neverRan
			c.mu.Unlock()
		}
		if !waits {
			c.ignoreInit()
			return nil
		}
		select {
		case <-c.exited:
			if c.exit.StartError != "" {
				return fmt.Errorf("%s: %w", c.exit.StartError, errdefs.ErrFailedPrecondition)
			}
			return nil // it was killed, which is not the start's failure
		case <-over:
			if !errors.Is(context.Cause(ctx), errAbandoned) {
				return fmt.Errorf("it is behind the exec barrier, and has not executed its program: %w", context.Cause(ctx))
			}
			over = nil // exited tells how it ends
		case <-time.After(pause):
		}
	}
}

// beforeReaping notes, when init has ended, whether it has become the program, and its OOM kills.
func (c *container) beforeReaping(pid int) {
	c.countOOM() // before systemd removes the cgroup
	waits, err := beforeExec(pid)
	c.mu.Lock()
	c.neverRan = err == nil && waits
	c.mu.Unlock()
}

// beforeExec reports whether a process has executed no program since its fork. It may have ended, but not
// been reaped. It is true of init, launched or not, until init becomes the program.
func beforeExec(pid int) (bool, error) {
	stat, err := process.ReadStat(pid)
	return err == nil && !stat.Executed, err
}
