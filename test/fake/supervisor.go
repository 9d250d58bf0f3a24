package fake

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
)

// stageTime is how long each stage of making a container takes.
const stageTime = 2 * time.Millisecond

// supervisor is one that serves. held is what it, or a dead one before it, has made for a pod or container.
type supervisor struct {
	*Node
	dir     string
	process *proc
	changed chan struct{} // closed and replaced with each event
	events  []*api.Event
	frozen  chan struct{} // while not nil, it answers nothing
	deleted []string      // the ids that a Delete did not find: a creation that it has overtaken is refused
}

type held struct {
	dir, id, cgroup string
	bare, made      bool
	process         *proc
	startedAt       int64
	exit            *api.Exit
	abandoned       chan struct{} // closed by Delete during the creation
}

// KillSupervisor ends the supervisor that serves, without its containers. FreezeSupervisor has it answer nothing.
func (n *Node) KillSupervisor() {
	for _, s := range n.serving() {
		s.process.end()
	}
}

// FreezeSupervisor has the supervisor that serves answer nothing more.
func (n *Node) FreezeSupervisor() {
	for _, s := range n.serving() {
		n.mu.Lock()
		s.frozen = make(chan struct{})
		n.mu.Unlock()
	}
}

func (n *Node) serving() (all []*supervisor) {
	n.mu.Lock()
	defer n.mu.Unlock()
	for _, s := range n.supervisors {
		if !s.process.Ended() {
			all = append(all, s)
		}
	}
	return all
}

// host is client.Host.
type host struct{ *Daemon }

func (h host) Dial(_ context.Context, dir string, closed func()) (client.Conn, error) {
	defer h.lock()()
	s := h.supervisors[dir]
	if s == nil || s.process.Ended() {
		return nil, fmt.Errorf("no supervisor serves %s: %w: %w", dir, errdefs.ErrUnavailable, unix.ECONNREFUSED)
	}
	c := &conn{d: h.Daemon, s: s}
	c.Context, c.end = context.WithCancel(s.process) // the kernel closes the socket of a process that has ended
	h.ends.Store(c, c.Close)
	context.AfterFunc(c, func() {
		h.ends.Delete(c)
		closed()
	})
	return c, nil
}

func (h host) DialSocket(context.Context, string, string) (*net.UnixConn, error) {
	return nil, errdefs.ErrNotImplemented
}

func (h host) LockHolder(dir string) (int, error) {
	defer h.lock()()
	if s := h.supervisors[dir]; s != nil && !s.process.Ended() {
		return s.process.pid, nil
	}
	return 0, nil
}

func (h host) EndLockHolder(dir string) error {
	defer h.lock()()
	h.supervisors[dir].process.end()
	return nil
}

// Start starts a supervisor, which adopts what is made of the containers of the last one, and removes the rest.
func (h host) Start(_ context.Context, o client.StartOptions) error {
	h.live()
	if err := h.reach("supervisor start"); err != nil {
		return err
	}
	about, err := json.Marshal(api.About{Build: o.Build, Protocol: api.Protocol, Records: api.RecordVersion})
	for _, dir := range []string{api.RecordDir, api.ExitDir} {
		err = errors.Join(err, os.MkdirAll(filepath.Join(o.Dir, dir), 0o700))
	}
	if err = errors.Join(err, state.WriteFile(filepath.Join(o.Dir, api.AboutFile), about, false)); err != nil {
		return err
	}
	h.mu.Lock()
	defer h.mu.Unlock()
	s := &supervisor{Node: h.Node, dir: o.Dir, process: h.spawn(), changed: make(chan struct{})}
	h.supervisors[o.Dir] = s
	for _, c := range h.held {
		switch {
		case c.dir != o.Dir:
		case !c.made:
			h.drop(c)
		case c.process.Ended():
			s.ended(c, 0, false)
		}
	}
	return nil
}

// conn is client.Conn.
type conn struct {
	api.ShimClient  // nil: other calls are no part of the fake
	context.Context // ends with the connection
	d               *Daemon
	s               *supervisor
	end             context.CancelFunc
}

func (c *conn) Close() error { c.end(); return nil }

func (c *conn) Peer() (client.Process, error) { return c.d.handle(c.s.process), nil }

// call has the supervisor do something, which goes on if the daemon dies.
func call[A any](ctx context.Context, c *conn, do func() (A, error)) (answer A, err error) {
	c.d.live()
	c.s.mu.Lock()
	frozen := c.s.frozen
	c.s.mu.Unlock()
	done := make(chan struct{})
	go func() {
		if frozen != nil {
			<-c.s.process.Done()
			return
		}
		answered, doErr := do()
		select {
		case <-c.s.process.Done():
		default:
			answer, err = answered, doErr
			close(done)
		}
	}()
	select {
	case <-done:
		err = errgrpc.ToGRPC(err)
	case <-c.Done():
		err = ttrpc.ErrClosed
	case <-ctx.Done():
		err = ctx.Err()
	}
	c.d.live()
	return answer, err
}

func (c *conn) Create(ctx context.Context, r *api.CreateRequest) (*api.CreateResponse, error) {
	return call(ctx, c, func() (*api.CreateResponse, error) { return c.s.create(r) })
}

func (s *supervisor) create(r *api.CreateRequest) (*api.CreateResponse, error) {
	content, err := os.ReadFile(filepath.Join(r.Bundle, "config.json"))
	spec := &specs.Spec{}
	if err = errors.Join(err, json.Unmarshal(content, spec)); err != nil {
		return nil, err
	}
	if args := spec.Process.Args; args[0] == "/missing" {
		return nil, fmt.Errorf("exec %q: no such file or directory: %w", args[0], errdefs.ErrFailedPrecondition)
	}
	inUserns := func(n specs.LinuxNamespace) bool { return n.Type == specs.UserNamespace }
	starter := !r.Bare || slices.ContainsFunc(spec.Linux.Namespaces, inUserns)
	c := &held{dir: s.dir, id: r.Id, cgroup: spec.Linux.CgroupsPath, bare: r.Bare, abandoned: make(chan struct{})}
	s.lock()
	if s.held[r.Id] != nil {
		s.mu.Unlock()
		return nil, fmt.Errorf("container %s: %w", r.Id, errdefs.ErrAlreadyExists)
	}
	if slices.Contains(s.deleted, r.Id) {
		s.mu.Unlock()
		return nil, fmt.Errorf("container %s is deleted: %w", r.Id, errdefs.ErrAborted)
	}
	s.held[r.Id] = c
	s.note("supervised", r.Id)
	err = os.WriteFile(filepath.Join(s.dir, api.RecordDir, r.Id+".json"), nil, 0o600)
	s.mu.Unlock()
	for _, stage := range []struct {
		point string
		do    func()
	}{
		{"starter/asked", func() { s.note("cgroup", c.cgroup) }},
		{"starter/made", func() { c.process = s.spawn(); s.note("process", c.id) }},
		{"", func() { c.made = true }},
		{"starter/answered", func() { s.report(c) }},
	} {
		if err == nil && (starter || stage.point == "") {
			err = s.stage(c, stage.point)
		}
		if c.made { // what the starter has answered is taken over
			err = nil
		}
		s.lock()
		if err != nil {
			s.drop(c)
			s.mu.Unlock()
			return nil, fmt.Errorf("%w: %w", errdefs.ErrUnavailable, err)
		}
		stage.do()
		s.mu.Unlock()
	}
	return &api.CreateResponse{Pid: int32(c.process.pid), StartTime: c.process.started()}, nil
}

// lock locks the node for a supervisor that has not ended.
func (s *supervisor) lock() {
	s.mu.Lock()
	if s.process.Ended() {
		s.mu.Unlock()
		runtime.Goexit()
	}
}

// stage is the time before a stage, and its failpoint. It does not return in a supervisor that has ended.
func (s *supervisor) stage(c *held, point string) error {
	reached := make(chan error, 1)
	go func() {
		time.Sleep(stageTime)
		reached <- s.reach(point)
	}()
	select {
	case err := <-reached:
		return err
	case <-c.abandoned:
		return errors.New("deleted while it was made")
	case <-s.process.Done():
		runtime.Goexit()
		return nil
	}
}

// drop removes all of a container. n.mu is held.
func (n *Node) drop(c *held) {
	if c.process != nil {
		c.process.end()
	}
	delete(n.held, c.id)
	for kind, name := range map[string]string{"supervised": c.id, "process": c.id, "cgroup": c.cgroup} {
		n.forget(kind, name)
	}
	for _, dir := range []string{api.RecordDir, api.ExitDir} {
		_ = os.Remove(filepath.Join(c.dir, dir, c.id+".json"))
	}
}

// ended records how a container ended, if it is not known yet. n.mu is held.
func (s *supervisor) ended(c *held, code int32, known bool) {
	c.process.end()
	s.forget("process", c.id)
	if c.exit != nil {
		return
	}
	c.exit = &api.Exit{Code: code, CodeKnown: known, FinishedAt: time.Now().UnixNano()}
	exit := api.ExitRecord{Code: code, CodeKnown: known, FinishedAt: c.exit.FinishedAt}
	if record, err := json.Marshal(exit); err == nil && !c.bare {
		_ = os.WriteFile(filepath.Join(s.dir, api.ExitDir, c.id+".json"), record, 0o600)
	}
	s.report(c)
}

func (s *supervisor) report(c *held) {
	if c.bare {
		return
	}
	s.events = append(s.events, &api.Event{Seq: uint64(len(s.events) + 1), Container: c.shown()})
	close(s.changed)
	s.changed = make(chan struct{})
}

func (c *held) shown() *api.Container {
	shown := &api.Container{Id: c.id, Pid: int32(c.process.pid), StartTime: c.process.started(), Exit: c.exit}
	shown.StartedAt = c.startedAt
	switch {
	case c.exit != nil:
		shown.Status = api.Status_STATUS_STOPPED
	case c.startedAt != 0:
		shown.Status = api.Status_STATUS_RUNNING
	default:
		shown.Status = api.Status_STATUS_CREATED
	}
	return shown
}

// with calls do with a container, under n.mu.
func (c *conn) with(ctx context.Context, id string, do func(*held) error) (*api.Empty, error) {
	return c.find(ctx, id, func() {}, do)
}

// find is with, and calls missing, also under n.mu, if there is no such container.
func (c *conn) find(ctx context.Context, id string, missing func(), do func(*held) error) (*api.Empty, error) {
	return call(ctx, c, func() (*api.Empty, error) {
		c.s.lock()
		defer c.s.mu.Unlock()
		h := c.s.held[id]
		if h == nil || h.dir != c.s.dir {
			missing()
			return nil, fmt.Errorf("container %s: %w", id, errdefs.ErrNotFound)
		}
		return &api.Empty{}, do(h)
	})
}

func (c *conn) Start(ctx context.Context, r *api.StartRequest) (*api.Empty, error) {
	return c.with(ctx, r.Id, func(h *held) error {
		if !h.made || h.startedAt != 0 || h.process.Ended() {
			return fmt.Errorf("container %s is not created: %w", r.Id, errdefs.ErrFailedPrecondition)
		}
		h.startedAt = time.Now().UnixNano()
		c.s.report(h)
		return nil
	})
}

// Kill ends a container, with SIGTERM unless it ignores that.
func (c *conn) Kill(ctx context.Context, r *api.KillRequest) (*api.Empty, error) {
	return c.with(ctx, r.Id, func(h *held) error {
		switch {
		case !h.made:
			return fmt.Errorf("container %s is being made: %w", r.Id, errdefs.ErrFailedPrecondition)
		case h.exit == nil && (r.Signal == uint32(unix.SIGKILL) || !c.s.made["stubborn "+r.Id]):
			c.s.ended(h, 128+int32(r.Signal), true)
		}
		return nil
	})
}

func (c *conn) Delete(ctx context.Context, r *api.DeleteRequest) (*api.Empty, error) {
	missing := func() { c.s.deleted = append(c.s.deleted, r.Id) }
	return c.find(ctx, r.Id, missing, func(h *held) error {
		switch {
		case !r.Kill && h.exit == nil:
			return fmt.Errorf("container %s runs: %w", r.Id, errdefs.ErrFailedPrecondition)
		case h.made:
			c.s.ended(h, 137, true)
		default:
			close(h.abandoned)
		}
		c.s.drop(h)
		return nil
	})
}

func (c *conn) List(ctx context.Context, _ *api.Empty) (*api.ListResponse, error) {
	return call(ctx, c, func() (*api.ListResponse, error) {
		c.s.mu.Lock()
		defer c.s.mu.Unlock()
		list := &api.ListResponse{}
		for _, h := range c.s.held {
			if h.dir == c.s.dir && h.made {
				list.Containers = append(list.Containers, h.shown())
			}
		}
		return list, nil
	})
}

func (c *conn) Update(ctx context.Context, r *api.UpdateRequest) (*api.Empty, error) {
	return c.with(ctx, r.Id, func(*held) error { return nil })
}

func (c *conn) NoteExit(ctx context.Context, r *api.NoteExitRequest) (*api.Empty, error) {
	return c.with(ctx, r.Id, func(h *held) error {
		c.s.ended(h, int32(unix.WaitStatus(r.Status).ExitStatus()), true)
		return nil
	})
}

func (c *conn) UseProgram(ctx context.Context, _ *api.UseProgramRequest) (*api.Empty, error) {
	return call(ctx, c, func() (*api.Empty, error) { return &api.Empty{}, nil })
}

func (c *conn) Events(ctx context.Context, r *api.EventsRequest) (api.Shim_EventsClient, error) {
	return &events{ctx: ctx, c: c, next: int(r.After)}, nil
}

type events struct {
	ttrpc.ClientStream
	ctx  context.Context
	c    *conn
	next int
}

func (e *events) Recv() (*api.Event, error) {
	for {
		e.c.s.mu.Lock()
		all, changed := e.c.s.events, e.c.s.changed
		e.c.s.mu.Unlock()
		if e.next < len(all) {
			e.next++
			return all[e.next-1], nil
		}
		select {
		case <-changed:
		case <-e.c.Done():
			return nil, ttrpc.ErrClosed
		case <-e.ctx.Done():
			return nil, e.ctx.Err()
		}
	}
}
