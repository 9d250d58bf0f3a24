package serve

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/runtime"
	"github.com/minicri/minicri/supervisor/stdio"
	"golang.org/x/sync/semaphore"
)

// container is a container of the node. Its state follows from facts: exit
// (stopped), record.StartedAt (running), else created.
type container struct {
	sup       *Supervisor
	stdinOnce bool
	created   chan struct{} // closed when it is made, or its creation has failed
	adopted   bool
	ended     chan struct{} // closed when init has ended
	exited    chan struct{} // closed when exit is set and on disk

	life    context.Context // of what is under way for it: ends when it is killed
	abandon context.CancelFunc

	startEvent sync.Once
	drained    sync.Once
	reported   chan syscall.WaitStatus // of an adopted init, by its parent

	// Of one that was adopted and had not ended, see watchAdopted; else nil. Its io is set
	// when ioAdopted is closed.
	follow    func()
	ioAdopted chan struct{}
	init      *runtime.Process // set before it is made; of one that has ended there is nothing

	ending     sync.Mutex // guards execsEnded, and is held while execs are ended
	execsEnded bool       // no exec of an earlier supervisor is left: see endLeftExecs

	op *semaphore.Weighted // one change at a time; may be held for long

	mu        sync.Mutex         // guards what follows
	io        *stdio.Streams     // see streams
	ioProblem error              // of Adopt
	runtime   *runtime.Container // as it is made; of an adopted one from the beginning
	record    record
	killed    bool // we sent SIGKILL: not the kernel for lack of memory
	oom       oomCount
	neverRan  bool        // init has ended and never executed the program
	initWords chan []byte // what init says behind the barrier; nil before
	initSays  *stdio.Fanout
	exit      *api.ExitRecord
	execs     map[string]*exec
}

// newContainer returns a container that has a record, on disk or not yet.
func (s *Supervisor) newContainer(r record) *container {
	c := &container{
		sup: s, record: r, runtime: s.runtime.Container(r.Facts), init: &runtime.Process{}, op: semaphore.NewWeighted(1),
		created: make(chan struct{}), ended: make(chan struct{}), exited: make(chan struct{}), ioAdopted: make(chan struct{}),
		reported: make(chan syscall.WaitStatus, 1), execs: map[string]*exec{},
	}
	c.life, c.abandon = context.WithCancel(context.Background())
	return c
}

// operationLimit bounds each operation, whatever its caller says.
const operationLimit = 4 * time.Minute

// errKilled ends what is under way for a container that is killed.
var errKilled = fmt.Errorf("it was ended with its container: %w", errdefs.ErrFailedPrecondition)

// bound returns the context of an operation: it ends with ctx, with the container, and
// at its limit.
func (c *container) bound(ctx context.Context) (context.Context, func()) {
	limited, cancel := context.WithTimeout(ctx, operationLimit)
	bounded, end := context.WithCancelCause(limited)
	stop := context.AfterFunc(c.life, func() { end(errKilled) })
	return bounded, func() {
		stop()
		end(nil)
		cancel()
	}
}

// create makes a container whose init waits at the exec barrier. On an error
// nothing is left.
func (s *Supervisor) create(ctx context.Context, request *api.CreateRequest) (*container, error) {
	spec, err := runtime.ReadSpec(request.Bundle)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	c := s.newContainer(record{
		Facts: runtime.FactsOf(request.Id, request.Bundle, request.Runtime, spec), Version: api.RecordVersion,
		LogPath: request.LogPath, Terminal: spec.Process.Terminal, Bare: request.Bare, CreatedAt: time.Now().UnixNano(),
	})
	c.stdinOnce, c.execsEnded = request.StdinOnce, true
	ctx, done := c.bound(ctx)
	defer done()
	if c.op.Acquire(ctx, 1) != nil {
		return nil, context.Cause(ctx)
	}
	defer c.op.Release(1)
	if err := s.reserve(c); err != nil {
		return nil, err
	}
	if err = c.build(ctx, request, spec); err != nil {
		s.forget(request.Id)
	}
	close(c.created)
	if err != nil {
		return nil, err
	}
	c.publish(api.EventKind_EVENT_CREATED)
	return c, nil
}

// publish emits an event of the container; a bare one has no listeners.
func (c *container) publish(kind api.EventKind) {
	if !c.record.Bare {
		c.sup.events.publish(kind, c.state())
	}
}

// build brings init to the barrier, with its streams.
func (c *container) build(ctx context.Context, request *api.CreateRequest, spec *specs.Spec) error {
	options := c.streamOptions()
	options.Stdin = request.Stdin
	if spec.Linux != nil {
		options.SELinux = spec.Linux.MountLabel
	}
	if err := writeJSON(c.sup.recordPath(c.record.ID), c.record); err != nil {
		return fmt.Errorf("write the record of container %s: %w", c.record.ID, err)
	}
	streams, ends, err := stdio.Open(options)
	if err == nil {
		// A program that makes the container has them meanwhile: what it writes has to be read,
		// or it waits.
		streams.Run()
		err = c.launch(ctx, spec, streams, ends)
	}
	if err != nil {
		return errors.Join(err, stdio.RemoveFifos(options.Dir, request.Id), c.sup.removeRecord(request.Id))
	}
	if !c.record.Bare {
		c.noteOOM()
	}
	go c.awaitInit()
	return nil
}

func (c *container) streamOptions() stdio.Options {
	return stdio.Options{Dir: filepath.Join(c.sup.dir, api.StreamDir), ID: c.record.ID, LogPath: c.record.LogPath, Terminal: c.record.Terminal, Bare: c.record.Bare, Journal: c.sup.journal}
}

func (c *container) launch(ctx context.Context, spec *specs.Spec, streams *stdio.Streams, ends stdio.Ends) (err error) {
	init, err := c.runtime.Create(ctx, spec, runtime.Streams{
		Stdio: [3]*os.File{ends.Stdin, ends.Stdout, ends.Stderr}, Terminal: c.record.Terminal,
	}, c.record.Bare, c.noteProgram)
	ends.Close()
	if err != nil {
		streams.Drain()
		return err
	}
	c.init = init
	c.mu.Lock()
	c.io = streams
	c.mu.Unlock()
	if c.record.Terminal {
		err = streams.TakeTerminal(c.init.Terminal)
	}
	if err := errors.Join(err, c.identify()); err != nil {
		streams.Close()
		return errors.Join(err, c.undoCreate())
	}
	return nil
}

// undoCreate ends an init that nothing waits for yet.
func (c *container) undoCreate() error {
	if err := c.init.Signal(syscall.SIGKILL); err != nil && !errors.Is(err, os.ErrProcessDone) {
		return err
	}
	c.init.Wait()
	return errors.Join(c.runtime.Delete(context.Background()), c.init.Close())
}

// identify records which process init is, so that a successor can adopt it.
func (c *container) identify() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.record.Facts, c.record.PID, c.record.StartTime = c.runtime.Facts, c.init.PID, c.init.StartTime
	return writeJSON(c.sup.recordPath(c.record.ID), c.record)
}

// start lets init through the barrier.
func (c *container) start(ctx context.Context) error {
	ctx, done := c.bound(ctx)
	defer done()
	if c.op.Acquire(ctx, 1) != nil {
		return context.Cause(ctx)
	}
	defer c.op.Release(1)
	if status := c.state().Status; status != api.Status_STATUS_CREATED {
		return fmt.Errorf("it is %v: %w", status, errdefs.ErrFailedPrecondition)
	}
	// Before the barrier opens: a successor must not take a program that runs for
	// one that waits.
	c.setStarted(time.Now().UnixNano())
	if err := writeJSON(c.sup.recordPath(c.record.ID), c.snapshot()); err != nil {
		c.setStarted(0)
		return err
	}
	c.listenToInit()
	if err := c.runtime.Start(ctx, c.ended); err != nil {
		c.setStarted(0)
		return errors.Join(err, writeJSON(c.sup.recordPath(c.record.ID), c.snapshot()))
	}
	if err := c.awaitProgram(ctx); err != nil {
		if errors.Is(err, context.DeadlineExceeded) { // it hangs, in a hook for example, with all that it has started
			err = errors.Join(err, c.kill(syscall.SIGKILL, true))
		}
		return err
	}
	c.announceStart()
	if err := c.runtime.Started(ctx, c.init); err != nil {
		c.sup.log.Warn("a hook failed after the start", "container", c.record.ID, "error", err)
	}
	return nil
}

// announceStart publishes the start once: before the exit, however quick.
func (c *container) announceStart() {
	c.startEvent.Do(func() { c.publish(api.EventKind_EVENT_STARTED) })
}

func (c *container) setStarted(at int64) {
	c.mu.Lock()
	c.record.StartedAt = at
	c.mu.Unlock()
}

// streams are nil before they are open, and of a container that was adopted when it had
// ended.
func (c *container) streams() *stdio.Streams {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.io
}

func (c *container) snapshot() record {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.record
}

func (c *container) hasEnded() bool { return isClosed(c.exited) }

// state is the container as clients see it.
func (c *container) state() *api.Container {
	c.mu.Lock()
	defer c.mu.Unlock()
	state := &api.Container{
		Id: c.record.ID, Pid: int32(c.record.PID), StartTime: c.record.StartTime, Adopted: c.adopted,
		LogPath: c.record.LogPath, CreatedAt: c.record.CreatedAt, StartedAt: c.record.StartedAt,
	}
	switch {
	case c.exit != nil:
		state.Status = api.Status_STATUS_STOPPED
		state.Exit = &api.Exit{
			Code: c.exit.Code, CodeKnown: c.exit.CodeKnown, OomKilled: c.exit.OOMKilled,
			FinishedAt: c.exit.FinishedAt, StartError: c.exit.StartError,
		}
	case c.record.StartedAt != 0:
		state.Status = api.Status_STATUS_RUNNING
	default:
		state.Status = api.Status_STATUS_CREATED
	}
	return state
}

// update sets resources: all that are named or, with an error, none.
func (c *container) update(ctx context.Context, r *api.UpdateRequest) error {
	ctx, done := c.bound(context.WithoutCancel(ctx)) // half an update is none
	defer done()
	if c.op.Acquire(ctx, 1) != nil {
		return context.Cause(ctx)
	}
	defer c.op.Release(1)
	if c.state().Exit != nil {
		return fmt.Errorf("it has ended: %w", errdefs.ErrFailedPrecondition)
	}
	var oomScoreAdj *int
	if r.OomScoreAdj != nil {
		oomScoreAdj = new(int(*r.OomScoreAdj))
	}
	return c.runtime.Update(ctx, r.Resources, oomScoreAdj)
}
