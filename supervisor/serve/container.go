package serve

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/semaphore"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/bundle"
	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/supervisor/stdio"
)

// container has a state that follows from facts: exit (stopped), record.StartedAt (running), else created.
type container struct {
	sup       *Supervisor
	stdinOnce bool
	created   chan struct{}   // closed when the creation is over, also one that failed
	exited    chan struct{}   // closed when exit is set and on disk
	running   context.Context // ends when init does; the cause is errInitEnded
	ended     context.CancelCauseFunc
	life      context.Context // bounds all operations on the container; ends when it is killed
	abandon   context.CancelFunc
	drained   sync.Once
	reported  chan syscall.WaitStatus // how an adopted init ended, by its parent

	init *proc // never nil; empty before init is made, and if it had ended when it was adopted

	op *semaphore.Weighted // one change at a time; may be held for long

	mu        sync.Mutex     // guards what follows
	io        *stdio.Streams // nil before they are open, and if the log had all when it was adopted
	record    record
	killed    bool // we sent SIGKILL, not the kernel for lack of memory
	oomKills  int  // how many of its processes the kernel has killed for lack of memory
	oomBefore int  // Supervisor.unclaimedOOMKills when it was made, or adopted
	neverRan  bool // init ended and never executed the program
	initSays  *stdio.Fanout
	initWords chan []byte // what init says after the barrier is opened; nil before
	exit      *api.ExitRecord
	left      *api.ExitRecord  // the exit that a predecessor wrote, if the log did not have all output yet
	template  *launch.Template // of execs; nil before the first one
	slots     map[int]bool     // the numbers of execs' cgroups: true is used, false has processes that an exec has left
	retried   int              // the last of those that was tried again
}

// record is the content of DIR/records/ID.json, by which a successor adopts the container. It is written
// before the container is made, without a pid, once it is made, and when it starts.
type record struct {
	bundle.Container
	MountLabel  string `json:"mount_label,omitempty"`
	Poststart   bool   `json:"poststart,omitempty"`    // it has such hooks
	Poststop    bool   `json:"poststop,omitempty"`     // it has such hooks, and no runtime runs them
	ExecCgroups string `json:"exec_cgroups,omitempty"` // of starter.Answer
	Version     int    `json:"version"`
	PID         int    `json:"pid"`        // 0: its creation was cut off
	StartTime   uint64 `json:"start_time"` // clock ticks since boot, guards against a reused pid
	LogPath     string `json:"log_path"`
	FifoDir     string `json:"fifo_dir,omitempty"` // where its fifos are, if not in io
	Terminal    bool   `json:"terminal"`
	Bare        bool   `json:"bare,omitempty"` // no streams, and its exit is not asked for
	StartedAt   int64  `json:"started_at"`
}

const ( // directories of states
	statesDir   = "containers" // libcontainer's, and those of launched pauses
	runtimesDir = "oci"        // of runtimes, which do not read each other's
)

func (s *Supervisor) newContainer(r record) *container {
	r.SystemdCgroup, r.Root = s.systemd, filepath.Join(s.dir, statesDir)
	if len(r.Runtime) > 0 {
		r.Root = filepath.Join(s.dir, runtimesDir, filepath.Base(r.Runtime[0]))
	}
	c := &container{
		sup: s, record: r, init: &proc{}, op: semaphore.NewWeighted(1),
		created: make(chan struct{}), exited: make(chan struct{}),
		reported: make(chan syscall.WaitStatus, 1), slots: make(map[int]bool),
	}
	c.life, c.abandon = context.WithCancel(context.Background())
	c.running, c.ended = context.WithCancelCause(context.Background())
	return c
}

// errAbandoned is the cause by which operations on a killed container end.
var errAbandoned = fmt.Errorf("it was ended with its container: %w", errdefs.ErrFailedPrecondition)

// bound returns an operation's context. It ends with ctx, with the container, and at the limit.
func (c *container) bound(ctx context.Context) (context.Context, func()) {
	limited, cancel := context.WithTimeout(ctx, operationLimit)
	bounded, end := context.WithCancelCause(limited)
	stop := context.AfterFunc(c.life, func() { end(errAbandoned) })
	return bounded, func() {
		stop()
		end(nil)
		cancel()
	}
}

// change is bound for an operation that no other may overlap.
func (c *container) change(ctx context.Context) (context.Context, func(), error) {
	ctx, done := c.bound(ctx)
	if c.op.Acquire(ctx, 1) != nil {
		err := context.Cause(ctx)
		done()
		return nil, nil, err
	}
	return ctx, func() {
		c.op.Release(1)
		done()
	}, nil
}

// create makes a container whose init waits at the exec barrier. On an error nothing is left but what errNotRemoved says.
func (s *Supervisor) create(ctx context.Context, request *api.CreateRequest) (*container, error) {
	c := s.newContainer(record{
		Container: bundle.Container{ID: request.Id, Bundle: request.Bundle, Runtime: request.Runtime},
		Version:   api.RecordVersion, LogPath: request.LogPath, Bare: request.Bare, FifoDir: request.FifoDir,
	})
	c.stdinOnce = request.StdinOnce
	ctx, done, err := c.change(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	if err := s.reserve(c); err != nil { // at once: a Delete may follow closely
		return nil, err
	}
	if err := c.build(ctx, request); err != nil {
		s.forget(request.Id)
		close(c.created)
		return nil, err
	}
	close(c.created)
	c.publish()
	return c, nil
}

// publish emits the state of the container; a bare one has no listeners.
func (c *container) publish() {
	if !c.record.Bare {
		c.sup.events.publish(c.state())
	}
}

// describe notes what the spec says.
func (c *container) describe(spec *specs.Spec) {
	c.mu.Lock()
	defer c.mu.Unlock()
	r := &c.record
	r.CgroupsPath, r.MountLabel, r.Terminal = spec.Linux.CgroupsPath, spec.Linux.MountLabel, spec.Process.Terminal
	r.Poststart = spec.Hooks != nil && len(spec.Hooks.Poststart) > 0
	r.Poststop = len(r.Runtime) == 0 && spec.Hooks != nil && len(spec.Hooks.Poststop) > 0
}

func (c *container) build(ctx context.Context, request *api.CreateRequest) error {
	spec, err := bundle.ReadSpec(request.Bundle)
	if err != nil {
		return fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	c.describe(spec)
	options := c.streamOptions()
	options.Stdin = request.Stdin
	if err := c.writeRecord(); err != nil {
		return fmt.Errorf("write the record of container %s: %w", c.record.ID, err)
	}
	streams, ends, err := stdio.Open(options)
	if err == nil {
		// A runtime holds the streams while it makes the container, and blocks if nobody reads them.
		streams.Run()
		err = c.makeInit(ctx, spec, streams, ends)
	}
	if err != nil {
		err = errors.Join(err, options.RemoveFifos())
		if !errors.Is(err, errNotRemoved) {
			err = errors.Join(err, os.RemoveAll(c.sup.recordPath(request.Id)))
		}
		return err
	}
	if !c.record.Bare {
		c.countOOMBefore()
	}
	go func() {
		c.init.awaitEnd()
		c.ended(errInitEnded)
		ended := time.Now()
		status, known := c.init.wait()
		c.finish(ended, status, known)
	}()
	return nil
}

// errNotRemoved means that a failed creation could not be undone: its record stays, for Delete and for a successor.
var errNotRemoved = errors.New("not all of it is removed")

func (c *container) streamOptions() stdio.Options {
	r := &c.record
	dir := filepath.Join(c.sup.dir, api.StreamDir)
	return stdio.Options{
		Dir: cmp.Or(r.FifoDir, dir), SpoolDir: dir, ID: r.ID, LogPath: r.LogPath,
		Terminal: r.Terminal, SELinux: r.MountLabel, Bare: r.Bare,
	}
}

// makeInit makes init, by a launch if it is a plain pause, and records its process for a successor.
// errdefs.ErrFailedPrecondition says that init ran and did not reach the barrier: the container lacks something.
func (c *container) makeInit(ctx context.Context, spec *specs.Spec, streams *stdio.Streams, ends stdio.Ends) (err error) {
	var answer starter.Answer
	var made *proc // nil after an error
	if c.record.Bare && len(c.record.Runtime) == 0 && launch.CanPause(spec) {
		made, answer, err = c.launchPause(ctx, spec)
	} else {
		request := c.request(starter.Create)
		request.Terminal = c.record.Terminal
		made, answer, err = c.startByStarter(ctx, request, ends, c.beforeReaping, nil)
	}
	ends.Close()
	if err == nil {
		if err = c.keepInit(made, answer, streams); err == nil {
			return nil
		}
		_ = made.signal(syscall.SIGKILL) // its cgroup is killed, too
	}
	remove := c.remove
	if made == nil && len(c.record.Runtime) > 0 { // its starter has had the runtime delete it, or was killed with it
		remove = func(context.Context) error { return c.record.Remove() }
	}
	if removeErr := remove(context.Background()); removeErr != nil {
		err = errors.Join(err, fmt.Errorf("%w: %w", errNotRemoved, removeErr))
	} else if made != nil {
		made.wait()
		err = errors.Join(err, made.close())
	}
	streams.Drain() // they read until now: a runtime or a hook may write
	return err
}

func (c *container) keepInit(made *proc, answer starter.Answer, streams *stdio.Streams) error {
	c.init = made // it was not nil before: who finds a container whose creation failed may ask it
	c.mu.Lock()
	c.io, c.record.Cgroups, c.record.ExecCgroups = streams, answer.Cgroups, answer.ExecCgroups
	c.record.PID, c.record.StartTime = made.PID, made.StartTime
	c.mu.Unlock()
	if c.record.Terminal {
		streams.TakeTerminal(made.terminal)
	}
	return c.writeRecord()
}

func (c *container) launchPause(ctx context.Context, spec *specs.Spec) (*proc, starter.Answer, error) {
	if err := os.MkdirAll(c.record.Dir(), 0o711); err != nil {
		return nil, starter.Answer{}, err
	}
	made, err := c.sup.launcher.Pause(ctx, launch.Pause{ID: c.record.ID, Dir: c.record.Dir(), Spec: spec, Cgroup: c.record.CgroupConfig()})
	if err != nil {
		return nil, starter.Answer{}, err
	}
	return procOf(made), starter.Answer{Cgroups: made.Cgroups}, nil
}

func (c *container) request(verb starter.Verb) starter.Request {
	return starter.Request{Verb: verb, Container: c.snapshot().Container}
}

// remove kills what is left, and removes cgroups and state, whatever poststop hooks say. It can be repeated.
func (c *container) remove(ctx context.Context) error {
	if len(c.record.Runtime) > 0 || c.record.Poststop {
		ctx, cancel := context.WithTimeout(ctx, operationLimit)
		defer cancel()
		err := c.sup.starters.Run(ctx, c.request(starter.Delete), nil, nil)
		if !errors.Is(err, errdefs.ErrFailedPrecondition) || len(c.record.Runtime) > 0 {
			return err
		}
		c.sup.log.Warn("a poststop hook failed", "container", c.record.ID, "error", err)
	}
	return c.record.Remove()
}

func (c *container) start(ctx context.Context) error {
	ctx, done, err := c.change(ctx)
	if err != nil {
		return err
	}
	defer done()
	if c.state().Status != api.Status_STATUS_CREATED {
		return fmt.Errorf("it was started before: %w", errdefs.ErrFailedPrecondition)
	}
	if err := c.init.awaitStarter(ctx); err != nil {
		return err
	}
	// Recorded before the barrier opens: a successor must not take a running program for one that waits.
	c.setStarted(time.Now().UnixNano())
	if err := c.writeRecord(); err != nil {
		c.setStarted(0)
		return err
	}
	c.listenToInit()
	if len(c.record.Runtime) > 0 {
		err = c.sup.starters.Run(ctx, c.request(starter.Start), nil, nil)
	} else {
		err = openBarrier(ctx, c.running, c.record.Dir())
	}
	if err != nil {
		c.setStarted(0)
		return errors.Join(err, c.writeRecord())
	}
	if err := c.awaitProgram(ctx); err != nil {
		if errors.Is(err, context.DeadlineExceeded) { // it hangs, perhaps in a hook: it is killed with all that it has started
			err = errors.Join(err, c.kill(syscall.SIGKILL, true))
		}
		return err
	}
	c.publish()
	if c.record.Poststart && len(c.record.Runtime) == 0 { // a runtime has run its hooks itself
		request := c.request(starter.Start)
		request.InitPID = c.init.PID
		if err := c.sup.starters.Run(ctx, request, nil, nil); err != nil {
			c.sup.log.Warn("a hook failed after the start", "container", c.record.ID, "error", err)
		}
	}
	return nil
}

func (c *container) setStarted(at int64) {
	c.mu.Lock()
	c.record.StartedAt = at
	c.mu.Unlock()
}

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

func (c *container) state() *api.Container {
	c.mu.Lock()
	defer c.mu.Unlock()
	state := &api.Container{
		Id: c.record.ID, Pid: int32(c.record.PID), StartTime: c.record.StartTime, StartedAt: c.record.StartedAt,
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
	ctx, done, err := c.change(context.WithoutCancel(ctx)) // an update is never cut off
	if err != nil {
		return err
	}
	defer done()
	if c.state().Exit != nil {
		return fmt.Errorf("it has ended: %w", errdefs.ErrFailedPrecondition)
	}
	request := c.request(starter.Update)
	request.Resources = r.Resources
	if r.OomScoreAdj != nil {
		request.OOMScoreAdj = new(int(*r.OomScoreAdj))
	}
	return c.sup.starters.Run(ctx, request, nil, nil)
}

func (c *container) attach(stream string, conn *net.UnixConn) (move func(), err error) {
	streams := c.streams()
	if streams == nil {
		return nil, fmt.Errorf("attach to container %s: it has ended: %w", c.record.ID, errdefs.ErrNotFound)
	}
	if stream == api.Stdin {
		over := func() {}
		if c.stdinOnce {
			over = streams.CloseStdin
		}
		return feed(streams.Stdin(), conn, over)
	}
	fan := streams.Output(stream)
	if fan == nil {
		return nil, fmt.Errorf("attach to container %s: stream %s: %w", c.record.ID, stream, errdefs.ErrNotFound)
	}
	output := fan.Attach(true)
	return func() {
		go func() {
			// The client sends nothing: the end of this read is the client's.
			_, _ = io.Copy(io.Discard, conn)
			fan.Detach(output)
		}()
		for chunk := range output {
			if _, err := conn.Write(chunk); err != nil {
				fan.Detach(output) // which ends it
			}
		}
	}, nil
}
