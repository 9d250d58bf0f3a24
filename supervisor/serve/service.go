package serve

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/pipe"
)

type service struct{ *Supervisor }

var empty = &api.Empty{}

// mapErrors turns errors of calls into statuses, which the client turns back into errors.
func mapErrors(ctx context.Context, request ttrpc.Unmarshaler, _ *ttrpc.UnaryServerInfo, call ttrpc.Method) (any, error) {
	answer, err := call(ctx, request)
	if err != nil {
		err = status.Error(statusOf(err))
	}
	return answer, err
}

func statusOf(err error) (code codes.Code, text string) {
	// The text has to be valid, or ttrpc ends the connection.
	return status.Code(errgrpc.ToGRPC(errdefs.Resolve(err))), strings.ToValidUTF8(err.Error(), "\uFFFD")
}

func (s service) on(id string, what func(*container) error) (*api.Empty, error) {
	c, err := s.find(id)
	if err == nil {
		err = what(c)
	}
	return empty, err
}

func (s service) Create(ctx context.Context, r *api.CreateRequest) (*api.CreateResponse, error) {
	c, err := s.create(ctx, r)
	if err != nil {
		return nil, err
	}
	return &api.CreateResponse{Pid: int32(c.init.PID), StartTime: c.init.StartTime}, nil
}

func (s service) Start(ctx context.Context, r *api.StartRequest) (*api.Empty, error) {
	return s.on(r.Id, func(c *container) error { return c.start(ctx) })
}

func (s service) Kill(_ context.Context, r *api.KillRequest) (*api.Empty, error) {
	signal := syscall.Signal(r.Signal)
	if c := s.get(r.Id); c != nil && !isClosed(c.created) && signal == syscall.SIGKILL {
		c.abandon() // its creation, which is under way
		return empty, nil
	}
	return s.on(r.Id, func(c *container) error { return c.kill(signal, r.All) })
}

func (s service) Delete(ctx context.Context, r *api.DeleteRequest) (*api.Empty, error) {
	c := s.toDelete(r.Id)
	if c == nil && r.Kill && s.hasRecord(r.Id) {
		return empty, s.removeUnknown(r.Id)
	}
	if c != nil && r.Kill && !isClosed(c.created) {
		c.abandon()
		limit := process.KillLimit
		if c.snapshot().Poststop {
			limit = operationLimit // the creation ends with these hooks
		}
		select {
		case <-c.created:
		case <-time.After(limit):
		case <-ctx.Done():
		}
	}
	return s.on(r.Id, func(c *container) error {
		if r.Kill {
			if err := c.end(); err != nil {
				return err
			}
		}
		return c.delete(ctx)
	})
}

func (s service) List(context.Context, *api.Empty) (*api.ListResponse, error) {
	list := new(api.ListResponse)
	for _, c := range s.all() {
		list.Containers = append(list.Containers, c.state())
	}
	boundErrors(list.Containers)
	return list, nil
}

// boundErrors shortens start errors that are too many for one message of ttrpc, 4 MiB with all else. The whole error of
// each is in its exit record.
func boundErrors(containers []*api.Container) {
	const maxErrors = 2 << 20
	most := maxErrors / max(1, len(containers))
	for _, c := range containers {
		if text := c.GetExit().GetStartError(); len(text) > most {
			c.Exit.StartError = strings.ToValidUTF8(text[:most], "")
		}
	}
}

func (s service) Events(ctx context.Context, r *api.EventsRequest, stream api.Shim_EventsServer) error {
	// A supervisor without containers ends with its last follower: with no daemon and no pods, nothing
	// stays. A daemon that comes in that moment starts another one.
	s.followers.Add(1)
	defer func() {
		if s.followers.Add(-1) == 0 && len(s.all()) == 0 {
			s.stop()
		}
	}()
	ctx, cancel := context.WithCancel(ctx) // the supervisor's end does not wait for listeners
	defer cancel()
	defer context.AfterFunc(s.life, cancel)()
	return s.events.stream(ctx, r.After, stream.Send)
}

// ExecStart is a call of protocol 2.
func (service) ExecStart(context.Context, *api.ExecStartRequest) (*api.Empty, error) {
	return nil, errdefs.ErrNotImplemented
}

// ExecWait is a call of protocol 2.
func (service) ExecWait(context.Context, *api.ExecWaitRequest) (*api.ExecWaitResponse, error) {
	return nil, errdefs.ErrNotImplemented
}

func (s service) Resize(_ context.Context, r *api.ResizeRequest) (*api.Empty, error) {
	return s.on(r.Id, func(c *container) error {
		var master *os.File
		if streams := c.streams(); streams != nil {
			master = streams.Terminal()
		}
		if master == nil {
			return fmt.Errorf("container %s has no terminal: %w", r.Id, errdefs.ErrFailedPrecondition)
		}
		return pipe.Resize(master, r.Width, r.Height)
	})
}

func (s service) ReopenLog(_ context.Context, r *api.ReopenLogRequest) (*api.Empty, error) {
	return s.on(r.Id, func(c *container) error { return c.streams().ReopenLog() })
}

func (s service) Update(ctx context.Context, r *api.UpdateRequest) (*api.Empty, error) {
	return s.on(r.Id, func(c *container) error { return c.update(ctx, r) })
}

// NoteExit keeps what the parent of an adopted init has reported; the first counts.
func (s service) NoteExit(_ context.Context, r *api.NoteExitRequest) (*api.Empty, error) {
	return s.on(r.Id, func(c *container) error {
		if c.init.PID == int(r.Pid) && c.init.StartTime == r.StartTime {
			select {
			case c.reported <- syscall.WaitStatus(r.Status):
			default: // reported before
			}
		}
		return nil
	})
}

func (s service) UseProgram(_ context.Context, r *api.UseProgramRequest) (*api.Empty, error) {
	if r.Path == "" {
		return empty, nil
	}
	program, err := os.Open(r.Path)
	if err != nil {
		return nil, fmt.Errorf("open the program of starters: %w: %w", errdefs.ErrInvalidArgument, err)
	}
	s.starters.Use(program)
	return empty, nil
}

func (s service) Shutdown(context.Context, *api.Empty) (*api.Empty, error) {
	if n := len(s.all()); n > 0 {
		return nil, fmt.Errorf("the supervisor has %d containers: %w", n, errdefs.ErrFailedPrecondition)
	}
	s.stop()
	return empty, nil
}

// eventHistory is how many events are kept for a client that comes back.
const eventHistory = 256

// broker numbers events and keeps the last ones. A slow reader holds up no other, and sees what it missed.
type broker struct {
	mu      sync.Mutex
	last    uint64
	history []*api.Event
	changed chan struct{} // closed and replaced at each event
}

func newBroker() *broker {
	return &broker{changed: make(chan struct{})}
}

func (b *broker) publish(c *api.Container) {
	b.mu.Lock()
	defer b.mu.Unlock()
	b.last++
	b.history = append(b.history, &api.Event{Seq: b.last, Container: c})
	if len(b.history) > eventHistory {
		b.history = b.history[1:]
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
			return b.history[i:len(b.history):len(b.history)], b.changed
		}
	}
	return nil, b.changed
}

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

// accept serves each connection in a goroutine, until the listener is closed.
func accept(listener net.Listener, serve func(*net.UnixConn)) {
	for {
		conn, err := listener.Accept()
		if err != nil {
			return
		}
		go serve(conn.(*net.UnixConn))
	}
}

func (s *Supervisor) serveStream(conn *net.UnixConn) {
	defer conn.Close()
	move, err := s.openStream(conn)
	var answer api.StreamResponse
	if err != nil {
		answer.Error = err.Error()
	}
	_ = json.NewEncoder(conn).Encode(answer) // a client that has gone is noticed by move
	if err == nil {
		move()
	}
}

// openStream reads the request. A client sends no data before the answer, so one read holds it alone.
func (s *Supervisor) openStream(conn *net.UnixConn) (move func(), err error) {
	_ = conn.SetDeadline(time.Now().Add(requestLimit))
	defer conn.SetDeadline(time.Time{})
	buffer := make([]byte, 4096)
	n, err := conn.Read(buffer)
	if err != nil {
		return nil, err
	}
	var request api.StreamRequest
	if err := json.Unmarshal(buffer[:n], &request); err != nil {
		return nil, fmt.Errorf("decode the request for a stream: %w", err)
	}
	c, err := s.find(request.Container)
	if err != nil {
		return nil, err
	}
	return c.attach(request.Stream, conn)
}

// feed returns what moves a client's input until either side ends. It gives up a client that has left while the process
// takes nothing. Clients of one container share the deadline, so they only look more often.
func feed(stdin *os.File, conn *net.UnixConn, over func()) (move func(), err error) {
	if stdin == nil {
		return nil, fmt.Errorf("attach to stdin: %w", errdefs.ErrNotFound)
	}
	return func() {
		defer over()
		for chunk, n := make([]byte, 32<<10), 0; err == nil; {
			n, err = conn.Read(chunk)
			for rest := chunk[:n]; len(rest) > 0; {
				_ = stdin.SetWriteDeadline(time.Now().Add(stdinPause))
				taken, failed := stdin.Write(rest)
				if failed != nil && (!errors.Is(failed, os.ErrDeadlineExceeded) || pipe.Polled(conn, 0)) {
					return
				}
				rest = rest[taken:]
			}
		}
	}, nil
}
