package supervisor

import (
	"errors"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/runtime"
	"github.com/minicri/minicri/shim/stdio"
)

// container is one container of the pod. Its state follows from facts: exit
// (stopped), record.StartedAt (running), else created.
type container struct {
	sup       *Supervisor
	runtime   runtime.Container // nil if adopted without its state
	init      *runtime.Process
	io        *stdio.Streams
	stdinOnce bool
	adopted   bool
	made      bool          // guarded by Supervisor.mu: what is above is set
	exited    chan struct{} // closed when exit is set and on disk

	startEvent sync.Once
	drained    sync.Once
	reported   chan syscall.WaitStatus // of an adopted init, by its parent
	oomWatched chan struct{}           // closed when no notice of an OOM kill can come any more
	sparing    sync.Mutex              // of a pause: held while its spare descriptors are changed

	op sync.Mutex // one change at a time; may be held for long

	mu        sync.Mutex // guards what follows
	record    record
	killed    bool // we sent SIGKILL: not the kernel for lack of memory
	oom       oomCount
	neverRan  bool        // init has ended and never executed the program
	initWords chan []byte // what init says behind the barrier; nil before
	initSays  *stdio.Fanout
	exit      *api.ExitRecord
	execs     map[string]*exec
}

// create makes a container whose init waits at the exec barrier. On an error
// nothing is left.
func (s *Supervisor) create(request *api.CreateRequest) (*container, error) {
	spec, err := runtime.ReadSpec(request.Bundle)
	if err != nil {
		return nil, fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	c := &container{
		sup: s, stdinOnce: request.StdinOnce, exited: make(chan struct{}), oomWatched: make(chan struct{}), execs: map[string]*exec{},
		record: record{
			Version: recordVersion, ID: request.Id, LogPath: request.LogPath,
			Terminal: spec.Process.Terminal, Bare: request.Bare, CreatedAt: time.Now().UnixNano(), Runtime: request.Runtime, Task: request.Task, Pause: request.Pause,
		},
	}
	c.op.Lock()
	defer c.op.Unlock()
	if err := s.reserve(c); err != nil {
		return nil, err
	}
	if err := c.build(request, spec); err != nil {
		s.forget(request.Id)
		return nil, err
	}
	s.setMade(c)
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
func (c *container) build(request *api.CreateRequest, spec *specs.Spec) error {
	options := c.streamOptions()
	options.Stdin = request.Stdin
	if spec.Linux != nil {
		options.SELinux = spec.Linux.MountLabel
	}
	streams, ends, err := stdio.Open(options)
	if err == nil && c.sharesStreams() {
		streams.Run()
	}
	if err == nil {
		err = c.launch(request.Bundle, spec, streams, ends)
	}
	if err != nil {
		c.releaseOutputs()
		return errors.Join(err, stdio.RemoveFifos(options.Dir, request.Id), os.RemoveAll(c.sup.recordPath(request.Id)))
	}
	if !c.record.Bare {
		c.watchOOM()
	}
	if !c.sharesStreams() {
		c.io.Run()
	}
	go c.awaitInit()
	return nil
}

// sharesStreams reports whether the runtime is a program that has the container's
// streams while it makes it: what it writes there has to be read, or it waits.
func (c *container) sharesStreams() bool {
	return len(c.record.Runtime) > 0 && !c.record.Task && !c.record.Terminal
}

func (c *container) launch(bundle string, spec *specs.Spec, streams *stdio.Streams, ends stdio.Ends) (err error) {
	made, init, err := c.sup.runtimeOf(c.record).Create(c.record.ID, bundle, spec, runtime.Streams{
		Stdin: ends.Stdin, Stdout: ends.Stdout, Stderr: ends.Stderr, Terminal: c.record.Terminal,
	})
	ends.Close()
	if err != nil {
		if c.sharesStreams() {
			streams.Drain()
		} else {
			streams.Close()
		}
		return err
	}
	c.mu.Lock()
	c.runtime, c.init, c.io = made, init, streams
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
	return errors.Join(c.runtime.Delete(), c.init.Close())
}

// identify records which process init is, so that a successor can adopt it.
func (c *container) identify() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.record.PID, c.record.StartTime, c.record.Cgroups = c.init.PID, c.init.StartTime, c.runtime.Cgroups()
	return writeJSON(c.sup.recordPath(c.record.ID), c.record)
}

// start lets init through the barrier.
func (c *container) start() error {
	c.op.Lock()
	defer c.op.Unlock()
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
	if err := c.runtime.Start(); err != nil {
		c.setStarted(0)
		return errors.Join(err, writeJSON(c.sup.recordPath(c.record.ID), c.snapshot()))
	}
	if err := c.awaitProgram(); err != nil {
		return err
	}
	c.announceStart()
	if err := c.runtime.Started(); err != nil {
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

func (c *container) snapshot() record {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.record
}

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

// kill signals init, or every process of the container. A signal to a stopped
// container is ErrNotFound.
func (c *container) kill(sig syscall.Signal, all bool) error {
	c.mu.Lock()
	stopped := c.exit != nil
	c.killed = c.killed || sig == syscall.SIGKILL
	c.mu.Unlock()
	if stopped {
		return fmt.Errorf("kill container %s: it has ended: %w", c.record.ID, errdefs.ErrNotFound)
	}
	var err error
	if all && c.runtime != nil {
		err = c.runtime.SignalAll(sig)
	}
	// A privileged init may have moved to a cgroup outside.
	if c.init != nil && (!all || sig == syscall.SIGKILL) {
		if killErr := c.init.Signal(sig); !errors.Is(killErr, os.ErrProcessDone) {
			err = errors.Join(err, killErr)
		}
	}
	if all && sig == syscall.SIGKILL && c.runtime != nil {
		err = errors.Join(err, c.sup.runtimeOf(c.snapshot()).Abort(c.record.ID)) // of a start or an exec that hangs
	}
	if err != nil {
		return fmt.Errorf("kill container %s: %w", c.record.ID, err)
	}
	return nil
}

// end kills a container that runs, and waits until it has ended.
func (c *container) end() error {
	if err := c.kill(syscall.SIGKILL, true); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	select {
	case <-c.exited:
		return nil
	case <-time.After(killTimeout):
		return fmt.Errorf("end container %s: it still runs %v after SIGKILL: %w", c.record.ID, killTimeout, errdefs.ErrUnavailable)
	}
}

// delete removes a stopped container. It may be called again after an error.
func (c *container) delete() error {
	if err := c.lockWithin(killTimeout); err != nil {
		return fmt.Errorf("delete container %s: %w", c.record.ID, err)
	}
	defer c.op.Unlock()
	select {
	case <-c.exited:
	default:
		return fmt.Errorf("delete container %s: it has not ended: %w", c.record.ID, errdefs.ErrFailedPrecondition)
	}
	if c.runtime != nil {
		if err := c.runtime.Delete(); err != nil {
			return fmt.Errorf("delete container %s: %w: %w", c.record.ID, errdefs.ErrUnavailable, err)
		}
	}
	if err := c.removeFiles(); err != nil {
		return fmt.Errorf("delete container %s: %w", c.record.ID, err)
	}
	if c.init != nil {
		_ = c.init.Close()
	}
	c.sup.forget(c.record.ID)
	c.publish(api.EventKind_EVENT_DELETED)
	return nil
}

func (c *container) removeFiles() error {
	var errs []error
	if !c.record.Bare {
		c.releaseOutputs()
		errs = append(errs, stdio.RemoveFifos(c.streamOptions().Dir, c.record.ID), os.RemoveAll(c.sup.exitPath(c.record.ID)))
	}
	record := c.sup.recordPath(c.record.ID)
	return errors.Join(append(errs, os.RemoveAll(record), os.RemoveAll(quarantined(record)))...)
}

// lockWithin takes op, which a hook that hangs may hold.
func (c *container) lockWithin(limit time.Duration) error {
	for deadline := time.Now().Add(limit); !c.op.TryLock(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			return fmt.Errorf("another operation on it is not done within %v: %w", limit, errdefs.ErrUnavailable)
		}
	}
	return nil
}
