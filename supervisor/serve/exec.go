package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/supervisor/stdio"
)

// exec is a further process of a container.
type exec struct {
	container *container
	proc      *proc
	cgroup    *execCgroup // nil: only the process itself can be ended
	pipes     *stdio.Pipes
	exited    chan struct{}
	code      int32       // set before exited is closed
	expire    *time.Timer // ends an exec that no client waits for
}

// execWaitTimeout is how long an exec may run without a client that waits.
const execWaitTimeout = 30 * time.Second

// execStart starts a process in a container that was created or started. Its streams are
// then opened one by one.
func (c *container) execStart(ctx context.Context, request *api.ExecStartRequest) (*exec, error) {
	if _, err := c.findExec(request.ExecId); err == nil || request.ExecId == "" {
		return nil, fmt.Errorf("exec %q in container %s: %w", request.ExecId, request.Id, errdefs.ErrAlreadyExists)
	}
	spec := new(specs.Process)
	if err := json.Unmarshal(request.Process, spec); err != nil {
		return nil, fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	if status := c.state().Status; status != api.Status_STATUS_RUNNING && status != api.Status_STATUS_CREATED {
		return nil, fmt.Errorf("it is %v: %w", status, errdefs.ErrFailedPrecondition)
	}
	if c.record.Cgroups.Frozen() {
		return nil, fmt.Errorf("container %s is frozen, and no process can be started in it: thaw its cgroup: %w", c.record.ID, errdefs.ErrFailedPrecondition)
	}
	ctx, done := c.bound(ctx)
	defer done()
	e := &exec{container: c, exited: make(chan struct{})}
	if err := e.start(ctx, spec, request.Stdin); err != nil {
		if exiting, _ := c.init.exiting(); exiting {
			err = fmt.Errorf("it ended while the command was being started: %w: %w", errdefs.ErrFailedPrecondition, err)
		}
		return nil, err
	}
	go e.await()
	e.expire = time.AfterFunc(execWaitTimeout, func() {
		_ = e.killTree()
		c.forgetExec(request.ExecId)
		e.release()
	})
	c.mu.Lock()
	c.execs[request.ExecId] = e
	c.mu.Unlock()
	if ctx.Err() != nil { // nobody waits for it
		e.expire.Reset(0)
		return nil, context.Cause(ctx)
	}
	return e, nil
}

// start makes the process, with its streams, in a cgroup of its own.
func (e *exec) start(ctx context.Context, spec *specs.Process, stdin bool) (err error) {
	var ends stdio.Ends
	if spec.Terminal {
		e.pipes = stdio.NewTerminalPipes()
	} else {
		options := e.container.streamOptions()
		options.Stdin = stdin
		if e.pipes, ends, err = stdio.OpenPipes(options); err != nil {
			return err
		}
		defer ends.Close()
	}
	record := &e.container.record
	if len(record.Program) == 0 || record.ExecCgroups == starter.ExecCgroupByName || record.ExecCgroups == starter.ExecCgroupByPath && record.Cgroups[""] != "" {
		e.cgroup = e.container.newExecCgroup()
	}
	if e.proc, err = e.makeProcess(ctx, spec, ends); err != nil {
		e.pipes.Close()
		return errors.Join(err, e.cgroup.kill(), e.cgroup.close())
	}
	if spec.Terminal {
		e.pipes.TakeTerminal(e.proc.terminal)
	}
	return nil
}

// makeProcess makes the process by a launch, or what a launch does not do by a starter.
func (e *exec) makeProcess(ctx context.Context, spec *specs.Process, ends stdio.Ends) (*proc, error) {
	c := e.container
	if len(c.record.Program) == 0 {
		container, err := starter.ReadSpec(c.record.Bundle)
		if err != nil {
			return nil, err
		}
		if launch.CanExec(container, spec) {
			if c.init.gone() {
				return nil, os.ErrProcessDone
			}
			made, err := c.sup.launcher.Exec(ctx, launch.Exec{ID: c.record.ID, Init: c.init.found, Spec: container, Process: spec, Streams: ends, Cgroups: e.cgroups()})
			if err != nil {
				return nil, err
			}
			return procOf(made), nil
		}
	}
	request := c.request(starter.Exec)
	request.Terminal, request.Process = spec.Terminal, spec
	if e.cgroup != nil {
		controller, _, _ := c.record.Cgroups.Tracker()
		request.ExecCgroup = starter.ExecCgroup{Controller: controller, Sub: e.cgroup.sub, Form: c.record.ExecCgroups}
	}
	p, _, err := c.startByStarter(ctx, request, ends, nil)
	return p, err
}

// cgroups are the container's, with that of the exec in its place.
func (e *exec) cgroups() starter.Cgroups {
	cgroups := e.container.record.Cgroups
	if e.cgroup != nil {
		controller, path, _ := cgroups.Tracker()
		cgroups = maps.Clone(cgroups)
		cgroups[controller] = filepath.Join(path, e.cgroup.sub)
	}
	return cgroups
}

// await waits for the process.
func (e *exec) await() {
	e.code = exitCode(e.proc.wait())
	e.pipes.Finish()
	close(e.exited)
}

// killTree ends the process and all that it started.
func (e *exec) killTree() error {
	err := e.proc.signal(syscall.SIGKILL)
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	return errors.Join(err, e.cgroup.kill())
}

// release closes what is open, when the process has ended: one in D state for example
// would not be reaped otherwise.
func (e *exec) release() {
	e.pipes.Close()
	closing := func() {
		<-e.exited
		_, _ = e.cgroup.close(), e.proc.close()
	}
	if isClosed(e.exited) {
		closing()
	} else {
		go closing()
	}
}

// execWait waits for the end of a process and of its opened outputs, and
// forgets it. A client that goes away takes the process with it.
func (c *container) execWait(ctx context.Context, id string) (int32, error) {
	e, err := c.findExec(id)
	if err != nil {
		return 0, err
	}
	e.expire.Stop()
	defer e.release()
	defer c.forgetExec(id)
	select {
	case <-e.exited:
	case <-ctx.Done():
	}
	if ctx.Err() != nil {
		if err := e.killTree(); err != nil {
			return 0, err
		}
		select {
		case <-e.exited:
		case <-time.After(killTimeout): // D state: it ends when it can, and is reaped then
			return 0, context.DeadlineExceeded
		}
	}
	delivered := make(chan struct{})
	go func() {
		defer close(delivered)
		e.pipes.AwaitOutput()
	}()
	select {
	case <-delivered:
	case <-ctx.Done(): // release closes the pipes, which ends the pumps
	}
	return e.code, nil
}

func (c *container) findExec(id string) (*exec, error) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if e := c.execs[id]; e != nil {
		return e, nil
	}
	return nil, fmt.Errorf("exec %s in container %s: %w", id, c.record.ID, errdefs.ErrNotFound)
}

func (c *container) forgetExec(id string) {
	c.mu.Lock()
	delete(c.execs, id)
	c.mu.Unlock()
}

// execCgroup is the cgroup of an exec, a child of its container's: what is in it can be
// ended, and nothing else. Calls on nil do nothing.
type execCgroup struct {
	container *container
	slot      int
	sub       string // its name
	note      string // the file that exists as long as a client waits for the exec

	mu             sync.Mutex // so that what is closed is not killed: the name may be another's
	killed, closed bool
}

const (
	// execCgroupPrefix begins the names of the cgroups of execs, which are used again and
	// again: what watches cgroups takes each new name for a new container.
	execCgroupPrefix = "minicri-exec-"
	// maxSlots bounds the search for a name: no container has so many execs with
	// something in the background.
	maxSlots = 1024
)

// execCgroupAt is that with a number, which may not be there.
func (c *container) execCgroupAt(slot int) *execCgroup {
	sub := execCgroupPrefix + strconv.Itoa(slot)
	return &execCgroup{container: c, slot: slot, sub: sub, note: filepath.Join(c.record.Dir(), sub)}
}

// newExecCgroup makes a child of the container's cgroup. Where that is refused, for
// example because the container has delegated its controllers, it is nil: the
// exec runs in the container's own, and only its first process can be ended.
func (c *container) newExecCgroup() *execCgroup {
	_, path, ok := c.record.Cgroups.Tracker()
	if !ok {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for slot := range maxSlots {
		if c.slots[slot] {
			continue
		}
		g := c.execCgroupAt(slot)
		// One that is there held what an earlier exec has left in the background, or
		// holds it: then its name is passed by.
		_ = os.Remove(filepath.Join(path, g.sub))
		err := os.Mkdir(filepath.Join(path, g.sub), 0o755)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err == nil {
			err = os.WriteFile(g.note, nil, 0o600)
		}
		if err != nil {
			_ = os.Remove(filepath.Join(path, g.sub))
			return nil
		}
		c.slots[slot] = true
		return g
	}
	return nil
}

// kill ends all that is in it. Once it is closed that is nothing.
func (g *execCgroup) kill() error {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil
	}
	g.killed = true
	return g.container.record.Cgroups.Signal(g.sub, syscall.SIGKILL)
}

// close removes the cgroup, unless it holds a background process of an exec
// that has ended by itself. Called again it does nothing.
func (g *execCgroup) close() error {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	err := os.RemoveAll(g.note)
	g.container.record.Cgroups.RemoveSub(g.sub, g.killed)
	g.container.mu.Lock()
	defer g.container.mu.Unlock()
	delete(g.container.slots, g.slot)
	return err
}

// leftExecs are the cgroups of execs that an earlier supervisor has left, whose streams
// nobody has any more. Their names are in use until they are closed.
func (c *container) leftExecs() (left []*execCgroup, err error) {
	notes, err := os.ReadDir(c.record.Dir())
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	for _, note := range notes {
		number, is := strings.CutPrefix(note.Name(), execCgroupPrefix)
		if slot, err := strconv.Atoi(number); is && err == nil {
			c.slots[slot] = true
			left = append(left, c.execCgroupAt(slot))
		}
	}
	return left, err
}

// endLeftExecs ends them, and not what they have put in the background.
func (c *container) endLeftExecs(left []*execCgroup) {
	for _, g := range left {
		if err := errors.Join(g.kill(), g.close()); err != nil && !isClosed(c.exited) {
			c.sup.log.Warn("an exec that no client waits for may still run", "container", c.record.ID, "error", err)
		}
	}
}
