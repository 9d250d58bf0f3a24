package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/bundle"
	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/supervisor/stdio"
)

type exec struct {
	container *container
	proc      *proc
	cgroup    *execCgroup // nil: only the process itself can be ended
	pipes     *stdio.Pipes
	exited    chan struct{}
	code      int32       // set before exited is closed
	expire    *time.Timer // ends it if no client waits for it
}

// execStart starts a process in a created or running container. A client then opens its streams.
func (c *container) execStart(ctx context.Context, request *api.ExecStartRequest) error {
	if _, err := c.findExec(request.ExecId); err == nil || request.ExecId == "" {
		return fmt.Errorf("exec %q in container %s: %w", request.ExecId, request.Id, errdefs.ErrAlreadyExists)
	}
	command := new(specs.Process)
	if err := json.Unmarshal(request.Process, command); err != nil {
		return fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	if status := c.state().Status; status != api.Status_STATUS_RUNNING && status != api.Status_STATUS_CREATED {
		return fmt.Errorf("it does not run: %w", errdefs.ErrFailedPrecondition)
	}
	if c.record.Cgroups.Frozen() {
		return fmt.Errorf("container %s is frozen, and no process can be started in it: thaw its cgroup: %w", c.record.ID, errdefs.ErrFailedPrecondition)
	}
	ctx, done := c.bound(ctx)
	defer done()
	e := &exec{container: c, exited: make(chan struct{})}
	if err := e.start(ctx, command, request.Stdin); err != nil {
		if exiting, _ := c.init.exiting(); exiting {
			err = fmt.Errorf("it ended while the command was being started: %w: %w", errdefs.ErrFailedPrecondition, err)
		}
		return err
	}
	go func() {
		e.code = exitCode(e.proc.wait())
		e.pipes.Finish()
		close(e.exited)
	}()
	id := request.ExecId // the request, with all its arguments, may go
	e.expire = time.AfterFunc(unaskedLimit, func() {
		_ = e.killTree()
		c.forgetExec(id)
		e.release()
	})
	c.mu.Lock()
	c.execs[request.ExecId] = e
	c.mu.Unlock()
	if ctx.Err() != nil { // nobody waits for it
		e.expire.Reset(0)
		return context.Cause(ctx)
	}
	return nil
}

func (e *exec) start(ctx context.Context, command *specs.Process, stdin bool) (err error) {
	var ends stdio.Ends
	if command.Terminal {
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
	if len(record.Runtime) == 0 || record.ExecCgroups == starter.ExecCgroupByName || record.ExecCgroups == starter.ExecCgroupByPath && record.Cgroups[""] != "" {
		e.cgroup = e.container.newExecCgroup()
	}
	if e.proc, err = e.makeProcess(ctx, command, ends); err != nil {
		e.pipes.Close()
		return errors.Join(err, e.cgroup.kill(), e.cgroup.close())
	}
	if command.Terminal {
		e.pipes.TakeTerminal(e.proc.terminal)
	}
	return nil
}

// makeProcess launches the process, or has a starter make what a launch cannot.
func (e *exec) makeProcess(ctx context.Context, command *specs.Process, ends stdio.Ends) (*proc, error) {
	c := e.container
	if len(c.record.Runtime) == 0 {
		spec, err := bundle.ReadSpec(c.record.Bundle)
		if err != nil {
			return nil, err
		}
		if launch.CanExec(spec, command) {
			if c.init.gone() {
				return nil, os.ErrProcessDone
			}
			made, err := c.sup.launcher.Exec(ctx, launch.Exec{ID: c.record.ID, Init: c.init.found, Spec: spec, Process: command, Streams: ends, Cgroups: e.cgroups()})
			if err != nil {
				return nil, err
			}
			return procOf(made), nil
		}
	}
	request := c.request(starter.Exec)
	request.Terminal, request.Process = command.Terminal, command
	if e.cgroup != nil {
		controller, _, _ := c.record.Cgroups.Tracker()
		request.ExecCgroup = starter.ExecCgroup{Controller: controller, Sub: e.cgroup.sub, Form: c.record.ExecCgroups}
	}
	p, _, err := c.startByStarter(ctx, request, ends, nil)
	return p, err
}

// cgroups are the container's, one of them replaced by the exec's own.
func (e *exec) cgroups() bundle.Cgroups {
	cgroups := e.container.record.Cgroups
	if e.cgroup != nil {
		controller, path, _ := cgroups.Tracker()
		cgroups = maps.Clone(cgroups)
		cgroups[controller] = filepath.Join(path, e.cgroup.sub)
	}
	return cgroups
}

func (e *exec) killTree() error {
	err := e.proc.signal(syscall.SIGKILL)
	if errors.Is(err, os.ErrProcessDone) || errors.Is(err, os.ErrPermission) && e.cgroup != nil { // see container.kill
		err = nil
	}
	return errors.Join(err, e.cgroup.kill())
}

// release closes the pipes, and the rest once the process is reaped, which may take long in D state.
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

// execWait returns when a process has ended and its opened outputs are delivered. It ends with its client.
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
		case <-time.After(process.KillLimit): // D state: it ends when it can, and is reaped then
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

// execCgroup is the cgroup of an exec in that of its container. Calls on nil do nothing.
type execCgroup struct {
	container *container
	slot      int
	sub       string // its name
	note      string // the file that exists as long as a client waits for the exec

	mu             sync.Mutex // a closed one must not be killed: another exec may have its name
	killed, closed bool
}

// execCgroupPrefix begins the names. They are reused: what watches cgroups takes a new name for a new container.
const execCgroupPrefix = "minicri-exec-"

// execCgroupAt returns the cgroup with a number, which may not exist.
func (c *container) execCgroupAt(slot int) *execCgroup {
	sub := execCgroupPrefix + strconv.Itoa(slot)
	return &execCgroup{container: c, slot: slot, sub: sub, note: filepath.Join(c.record.Dir(), sub)}
}

const maxSlots = 1024 // no container has so many execs with something in the background

// newExecCgroup makes a child of the container's cgroup. It returns nil if that is refused, or takes no process
// because the container has made another one threaded: then only the first process of the exec can be ended.
func (c *container) newExecCgroup() *execCgroup {
	_, path, ok := c.record.Cgroups.Tracker()
	if !ok {
		return nil
	}
	for slot := c.takeSlot(true); slot < maxSlots; slot = c.takeSlot(false) {
		g := c.execCgroupAt(slot)
		// Where an earlier exec has left something in the background, the next name is tried. The note comes before the
		// cgroup: a successor kills and removes the cgroups that have one.
		if err := os.Remove(filepath.Join(path, g.sub)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			c.endSlot(slot, true)
			continue
		}
		err := errors.Join(os.WriteFile(g.note, nil, 0o600), os.Mkdir(filepath.Join(path, g.sub), 0o755))
		kind, _ := os.ReadFile(filepath.Join(path, g.sub, "cgroup.type")) // of version 2
		if err != nil || strings.Contains(string(kind), "invalid") {
			_, _ = os.Remove(filepath.Join(path, g.sub)), os.Remove(g.note)
			c.endSlot(slot, false)
			return nil
		}
		return g
	}
	return nil
}

// takeSlot takes the lowest number that is not taken, or maxSlots if there is none. To retry takes one, the next in turn, of
// those that an exec has left something in: it may have ended meanwhile. An exec does not try all of them.
func (c *container) takeSlot(retry bool) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range maxSlots {
		next := (c.retried + 1 + i) % maxSlots
		if used, taken := c.slots[next]; retry && taken && !used {
			c.retried, c.slots[next] = next, true
			return next
		}
	}
	for slot := range maxSlots {
		if _, taken := c.slots[slot]; !taken {
			c.slots[slot] = true
			return slot
		}
	}
	return maxSlots
}

// endSlot frees a number, unless something is left in its cgroup.
func (c *container) endSlot(slot int, isLeft bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if delete(c.slots, slot); isLeft {
		c.slots[slot] = false
	}
}

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

// close removes the cgroup, unless an exec that ended by itself left a process in it. It can be repeated.
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
	_, path, _ := g.container.record.Cgroups.Tracker()
	_, statErr := os.Lstat(filepath.Join(path, g.sub))
	g.container.endSlot(g.slot, statErr == nil)
	return err
}

// leftExecs returns the cgroups of an earlier supervisor's execs, whose names are in use until closed.
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

// endLeftExecs kills these execs. What ended execs left in the background runs on: those have no note.
func (c *container) endLeftExecs(left []*execCgroup) {
	for _, g := range left {
		if err := errors.Join(g.kill(), g.close()); err != nil && !isClosed(c.exited) {
			c.sup.log.Warn("an exec that no client waits for may still run", "container", c.record.ID, "error", err)
		}
	}
}

// attach connects a stream of an exec. An output is taken, so that ExecWait waits for it, and moved to the
// client. A client that goes away closes the pipe, as a shell's reader would.
func (e *exec) attach(stream string, conn *net.UnixConn) (move func(), err error) {
	if stream == api.Stdin {
		return feed(e.pipes.Stdin(), conn, e.pipes.CloseStdin)
	}
	var p *stdio.Pump
	p, err = e.pipes.Take(stream, func(chunk []byte) {
		if _, err := conn.Write(chunk); err != nil {
			_ = p.Close()
		}
	})
	if err != nil {
		return nil, err
	}
	return p.Run, nil
}
