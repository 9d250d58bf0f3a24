package serve

import (
	"context"
	"fmt"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"google.golang.org/grpc/status"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/stdio"
)

// service is the control protocol: it finds the object, calls it, and maps the
// error.
type service struct{ sup *Supervisor }

var done = &api.Empty{}

// mapped turns an error into a status that the client turns back.
func mapped(err error) error {
	if err == nil {
		return nil
	}
	return status.Error(status.Code(errgrpc.ToGRPC(errdefs.Resolve(err))), err.Error())
}

// on calls what with a container.
func (s *service) on(id string, what func(*container) error) (*api.Empty, error) {
	c, err := s.sup.find(id)
	if err == nil {
		err = what(c)
	}
	return done, mapped(err)
}

func (s *service) Create(ctx context.Context, r *api.CreateRequest) (*api.CreateResponse, error) {
	c, err := s.sup.create(ctx, r)
	if err != nil {
		return nil, mapped(err)
	}
	record := c.snapshot()
	return &api.CreateResponse{Pid: int32(record.PID), StartTime: record.StartTime}, nil
}

func (s *service) Start(ctx context.Context, r *api.StartRequest) (*api.Empty, error) {
	return s.on(r.Id, func(c *container) error { return c.start(ctx) })
}

func (s *service) Kill(_ context.Context, r *api.KillRequest) (*api.Empty, error) {
	if r.ExecId == "" {
		return done, mapped(s.sup.kill(r.Id, syscall.Signal(r.Signal), r.All))
	}
	return s.on(r.Id, func(c *container) error {
		e, err := c.findExec(r.ExecId)
		if err != nil {
			return err
		}
		if r.All {
			return e.process.KillTree()
		}
		return e.process.Signal(syscall.Signal(r.Signal))
	})
}

func (s *service) Delete(ctx context.Context, r *api.DeleteRequest) (*api.Empty, error) {
	if r.Kill {
		if err := s.sup.end(r.Id); errdefs.IsNotFound(err) && s.sup.hasRecord(r.Id) {
			return done, mapped(s.sup.removeUnreadable(r.Id))
		} else if err != nil {
			return done, mapped(err)
		}
	}
	return s.on(r.Id, func(c *container) error { return c.delete(ctx) })
}

func (s *service) List(context.Context, *api.Empty) (*api.ListResponse, error) {
	list := new(api.ListResponse)
	for _, c := range s.sup.all() {
		list.Containers = append(list.Containers, c.state())
	}
	return list, nil
}

func (s *service) Events(ctx context.Context, r *api.EventsRequest, stream api.Shim_EventsServer) error {
	defer s.sup.follow()()
	// The supervisor's own end must not wait for listeners.
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	defer context.AfterFunc(s.sup.life, cancel)()
	return mapped(s.sup.events.stream(ctx, r.After, stream.Send))
}

func (s *service) ExecStart(ctx context.Context, r *api.ExecStartRequest) (*api.ExecStartResponse, error) {
	c, err := s.sup.find(r.Id)
	if err != nil {
		return nil, mapped(err)
	}
	e, err := c.execStart(ctx, r)
	if err != nil {
		return nil, mapped(err)
	}
	return &api.ExecStartResponse{Pid: int32(e.process.PID)}, nil
}

func (s *service) ExecWait(ctx context.Context, r *api.ExecWaitRequest) (*api.ExecWaitResponse, error) {
	c, err := s.sup.find(r.Id)
	if err != nil {
		return nil, mapped(err)
	}
	code, err := c.execWait(ctx, r.ExecId)
	return &api.ExecWaitResponse{Code: code}, mapped(err)
}

func (s *service) Resize(_ context.Context, r *api.ResizeRequest) (*api.Empty, error) {
	return s.on(r.Id, func(c *container) error {
		master, err := c.master(r.ExecId)
		if err != nil {
			return err
		}
		return stdio.Resize(master, r.Width, r.Height)
	})
}

// master is the terminal of an exec, or of the container itself.
func (c *container) master(execID string) (master *os.File, err error) {
	if execID != "" {
		e, err := c.findExec(execID)
		if err != nil {
			return nil, err
		}
		master = e.pipes.Terminal()
	} else if streams := c.streams(); streams != nil {
		master = streams.Terminal()
	}
	if master == nil {
		return nil, fmt.Errorf("container %s exec %q has no terminal: %w", c.record.ID, execID, errdefs.ErrFailedPrecondition)
	}
	return master, nil
}

func (s *service) ReopenLog(_ context.Context, r *api.ReopenLogRequest) (*api.Empty, error) {
	return s.on(r.Id, func(c *container) error {
		streams := c.streams()
		if streams == nil {
			return nil
		}
		return streams.ReopenLog()
	})
}

func (s *service) Update(ctx context.Context, r *api.UpdateRequest) (*api.Empty, error) {
	return s.on(r.Id, func(c *container) error { return c.update(ctx, r) })
}

func (s *service) NoteExit(_ context.Context, r *api.NoteExitRequest) (*api.Empty, error) {
	return s.on(r.Id, func(c *container) error {
		if record := c.snapshot(); record.PID == int(r.Pid) && record.StartTime == r.StartTime {
			c.noteExit(syscall.WaitStatus(r.Status))
		}
		return nil
	})
}

func (s *service) UseProgram(_ context.Context, r *api.UseProgramRequest) (*api.Empty, error) {
	if r.Path == "" {
		return done, nil
	}
	program, err := os.Open(r.Path)
	if err != nil {
		return nil, mapped(fmt.Errorf("open the program of starters: %w: %w", errdefs.ErrInvalidArgument, err))
	}
	s.sup.runtime.Starters.Use(program)
	return done, nil
}

func (s *service) Shutdown(context.Context, *api.Empty) (*api.Empty, error) {
	if n := len(s.sup.all()); n > 0 {
		return nil, mapped(fmt.Errorf("the supervisor has %d containers: %w", n, errdefs.ErrFailedPrecondition))
	}
	s.sup.stop()
	return done, nil
}

// eventHistory is how many events are kept for a client that comes back.
const eventHistory = 256

// broker numbers events and keeps the last ones. Readers pull: one that does not read
// holds up no other, and sees by the numbers what it missed.
type broker struct {
	mu      sync.Mutex
	last    uint64
	history []*api.Event
	changed chan struct{} // closed and replaced at each event
}

func newBroker() *broker {
	return &broker{changed: make(chan struct{})}
}

func (b *broker) publish(kind api.EventKind, c *api.Container) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last++
	b.history = append(b.history, &api.Event{Seq: b.last, Kind: kind, At: time.Now().UnixNano(), Container: c})
	if len(b.history) > eventHistory {
		b.history = append([]*api.Event(nil), b.history[1:]...)
	}
	close(b.changed)
	b.changed = make(chan struct{})
}

// since returns the kept events after seq, and what closes at the next one.
func (b *broker) since(seq uint64) ([]*api.Event, <-chan struct{}) {
	b.mu.Lock()
	defer b.mu.Unlock()
	for i, e := range b.history {
		if e.Seq > seq {
			return append([]*api.Event(nil), b.history[i:]...), b.changed
		}
	}
	return nil, b.changed
}

// stream sends events until ctx ends or send fails.
func (b *broker) stream(ctx context.Context, seq uint64, send func(*api.Event) error) error {
	for {
		events, changed := b.since(seq)
		for _, e := range events {
			if err := send(e); err != nil {
				return err
			}
			seq = e.Seq
		}
		select {
		case <-ctx.Done():
			return nil
		case <-changed:
		}
	}
}
