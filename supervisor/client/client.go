package client

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
)

// Client talks to one supervisor. It has the calls of the protocol, see shim.proto; their
// errors are errdefs kinds.
type Client struct {
	dir  string
	conn *ttrpc.Client
	rpc  api.ShimClient // over conn
	peer *peer

	closed chan struct{} // closed when the connection is
	lost   chan struct{} // closed when the supervisor has ended

	life context.Context // ends lostGrace after the supervisor
	over context.CancelFunc
}

// ErrLost says that the connection to a supervisor is gone. It is an
// errdefs.ErrUnavailable.
var ErrLost = fmt.Errorf("the supervisor has ended, and another one takes its place: try again: %w", errdefs.ErrUnavailable)

// Connect connects to the supervisor that serves dir. errdefs.ErrUnavailable
// says that there is none: Start one.
func Connect(ctx context.Context, dir string) (*Client, error) {
	return connect(ctx, dir, nil)
}

// connect ends a supervisor that does not answer a call within the limit, none
// if nil.
func connect(ctx context.Context, dir string, answer *atomic.Int64) (*Client, error) {
	conn, err := dialSocket(ctx, filepath.Join(dir, api.ControlSocket))
	if err != nil {
		return nil, err
	}
	p, err := newPeer(conn, dir, answer)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	c := &Client{dir: dir, peer: p, closed: make(chan struct{}), lost: make(chan struct{})}
	c.conn = ttrpc.NewClient(conn, ttrpc.WithUnaryClientInterceptor(p.watch), ttrpc.WithOnClose(func() { close(c.closed) }))
	c.rpc = api.NewShimClient(c.conn)
	c.life, c.over = context.WithCancel(context.Background())
	context.AfterFunc(c.life, func() { _ = c.conn.Close() })
	go c.await() // ends with the supervisor, or Close
	return c, nil
}

// await ends the connections to a supervisor that has ended. A child of it may have a
// copy of a socket, which keeps the connection.
func (c *Client) await() {
	if c.peer.Wait() == nil { // not closed
		close(c.lost)
		time.AfterFunc(lostGrace, c.over)
	}
}

// lostGrace is for what a supervisor has said before it ended.
const lostGrace = time.Second

// greetLimit is how long greet waits: a connection that is refused is closed at
// once.
const greetLimit = time.Second

// greet makes sure that the supervisor serves, and hands it the program for its starters:
// one that is about to end closes new connections, which is ErrLost. One that says
// nothing may serve.
func (c *Client) greet(ctx context.Context, options SetOptions) error {
	limited, cancel := context.WithTimeout(ctx, greetLimit)
	defer cancel()
	err := c.UseProgram(limited, options.Start.ForOthers)
	if errdefs.IsUnavailable(err) {
		return err
	}
	if err != nil && options.Logger != nil {
		options.Logger.Warn("a supervisor was not handed this build's program for its starters", "dir", c.dir, "err", err)
	}
	return ctx.Err()
}

// Close closes the connection; the supervisor lives on.
func (c *Client) Close() error { return errors.Join(c.conn.Close(), c.peer.Close()) }

// Lost is closed when the supervisor has ended.
func (c *Client) Lost() <-chan struct{} { return c.lost }

// broken reports whether the connection is closed, as it is soon after the end of the
// supervisor.
func (c *Client) broken() bool {
	select {
	case <-c.closed:
		return true
	case <-c.lost:
		return true
	default:
		return false
	}
}

// open opens a connection for one call that takes as long as a program runs. Its ctx
// ends when it is done.
func (c *Client) open(ctx context.Context) (_ context.Context, call api.ShimClient, done func(), err error) {
	conn, err := dialSocket(ctx, filepath.Join(c.dir, api.ControlSocket))
	if err != nil {
		return nil, nil, nil, err
	}
	client := ttrpc.NewClient(conn)
	ctx, cancel := context.WithCancel(ctx)
	stop := context.AfterFunc(c.life, func() { _ = client.Close() })
	over := c.peer.attend(ctx)
	return ctx, api.NewShimClient(client), func() {
		stop()
		over()
		cancel()
		_ = client.Close()
	}, nil
}

func dialSocket(ctx context.Context, path string) (*net.UnixConn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("no supervisor serves %s, start one: %w: %w", path, errdefs.ErrUnavailable, err)
	}
	return conn.(*net.UnixConn), nil
}

// native turns what came over the wire into an errdefs kind.
func native(err error) error {
	switch {
	case err == nil:
		return nil
	case errors.Is(err, ttrpc.ErrClosed), errors.Is(err, net.ErrClosed):
		return fmt.Errorf("%w: %w", ErrLost, err)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	}
	return errgrpc.ToNative(err)
}

// Create makes a container whose init waits at the exec barrier.
func (c *Client) Create(ctx context.Context, r *api.CreateRequest) (*api.CreateResponse, error) {
	answer, err := c.rpc.Create(ctx, r)
	return answer, native(err)
}

// Start lets the container's program run.
func (c *Client) Start(ctx context.Context, id string) error {
	_, err := c.rpc.Start(ctx, &api.StartRequest{Id: id})
	return native(err)
}

// Kill signals a container's init, or with all every process of it.
func (c *Client) Kill(ctx context.Context, id string, signal uint32, all bool) error {
	_, err := c.rpc.Kill(ctx, &api.KillRequest{Id: id, Signal: signal, All: all})
	return native(err)
}

// Delete removes a stopped container, or with kill one that runs.
// errdefs.ErrUnavailable says that processes do not go yet: call again.
func (c *Client) Delete(ctx context.Context, id string, kill bool) error {
	_, err := c.rpc.Delete(ctx, &api.DeleteRequest{Id: id, Kill: kill})
	return native(err)
}

// List returns all containers, in no order.
func (c *Client) List(ctx context.Context) ([]*api.Container, error) {
	answer, err := c.rpc.List(ctx, &api.Empty{})
	return answer.GetContainers(), native(err)
}

// Resize sets the size of a terminal; an empty exec is the container's.
func (c *Client) Resize(ctx context.Context, id, exec string, width, height uint32) error {
	_, err := c.rpc.Resize(ctx, &api.ResizeRequest{Id: id, ExecId: exec, Width: width, Height: height})
	return native(err)
}

// ReopenLog continues in a new file at the log's path.
func (c *Client) ReopenLog(ctx context.Context, id string) error {
	_, err := c.rpc.ReopenLog(ctx, &api.ReopenLogRequest{Id: id})
	return native(err)
}

// Update sets the named resources, and oom_score_adj if it is not nil; all or
// with an error none.
func (c *Client) Update(ctx context.Context, id string, resources *specs.LinuxResources, oomScoreAdj *int) error {
	encoded, err := json.Marshal(resources)
	if err != nil {
		return fmt.Errorf("update container %s: %w", id, err)
	}
	request := &api.UpdateRequest{Id: id, Resources: encoded}
	if oomScoreAdj != nil {
		request.OomScoreAdj = new(int32(*oomScoreAdj))
	}
	_, err = c.rpc.Update(ctx, request)
	return native(err)
}

// NoteExit passes on how the init of an adopted container has ended, which the
// caller has reaped: status is wait4(2)'s.
func (c *Client) NoteExit(ctx context.Context, id string, pid int, startTime uint64, status uint32) error {
	_, err := c.rpc.NoteExit(ctx, &api.NoteExitRequest{Id: id, Pid: int32(pid), StartTime: startTime, Status: status})
	return native(err)
}

// UseProgram has starters run another build of the program from now on.
func (c *Client) UseProgram(ctx context.Context, path string) error {
	_, err := c.rpc.UseProgram(ctx, &api.UseProgramRequest{Path: path})
	return native(err)
}

// Shutdown ends the supervisor. errdefs.ErrFailedPrecondition while it has
// containers.
func (c *Client) Shutdown(ctx context.Context) error {
	_, err := c.rpc.Shutdown(ctx, &api.Empty{})
	if err = native(err); errdefs.IsUnavailable(err) {
		return nil // it ended before it could answer
	}
	return err
}

// Stream opens api.Stdin, api.Stdout or api.Stderr of an exec, or with an empty
// exec of the container itself: attach. What comes from the connection, or goes
// into it, is the stream's bytes; CloseWrite on stdin is its end.
func (c *Client) Stream(ctx context.Context, id, exec, stream string) (*net.UnixConn, error) {
	conn, err := dialSocket(ctx, filepath.Join(c.dir, api.StreamSocket))
	if err != nil {
		return nil, err
	}
	defer c.peer.attend(ctx)()
	defer context.AfterFunc(ctx, func() { _ = conn.Close() })()
	defer context.AfterFunc(c.life, func() { _ = conn.Close() })() // a copy of its socket keeps the connection
	if err := request(conn, api.StreamRequest{Container: id, Exec: exec, Stream: stream}); err != nil {
		_ = conn.Close()
		return nil, fmt.Errorf("open %s of container %s exec %q: %w", stream, id, exec, err)
	}
	return conn, nil
}

// request asks for a stream and reads the answer, byte by byte: what follows it
// is data.
func request(conn *net.UnixConn, what api.StreamRequest) error {
	line, err := json.Marshal(what)
	if err != nil {
		return err
	}
	if _, err := conn.Write(append(line, '\n')); err != nil {
		return fmt.Errorf("%w: %w", errdefs.ErrUnavailable, err)
	}
	var answer []byte
	for b := make([]byte, 1); b[0] != '\n'; answer = append(answer, b[0]) {
		if _, err := conn.Read(b); err != nil {
			return fmt.Errorf("%w: %w", errdefs.ErrUnavailable, err)
		}
	}
	var response api.StreamResponse
	if err := json.Unmarshal(answer, &response); err != nil {
		return err
	}
	if response.Error != "" {
		return fmt.Errorf("%w: %s", errdefs.ErrNotFound, response.Error)
	}
	return nil
}

// Events calls each for every event after a sequence number (0: all that are
// kept), on the caller's goroutine, until ctx ends, each fails or the supervisor is
// gone. A gap in the numbers says that events were dropped: List then.
func (c *Client) Events(ctx context.Context, after uint64, each func(*api.Event) error) error {
	ctx, call, done, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer done()
	stream, err := call.Events(ctx, &api.EventsRequest{After: after})
	if err != nil {
		return native(err)
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			return native(err)
		}
		if err := each(event); err != nil {
			return err
		}
	}
}

// Output keeps what a container has written and its supervisor has not read: the
// kernel drops the content of a fifo that no process has open, and a supervisor
// that is killed and a container that ends are two. Nothing is read from it. (Its
// descriptors are none of Go's poller, which every write would wake.)
type Output struct{ fds []int }

// HoldOutput opens the fifos of a container of the supervisor that serves dir,
// as far as it has any.
func HoldOutput(dir, id string) *Output {
	o := &Output{}
	for _, stream := range []string{api.Stdout, api.Stderr} {
		fd, err := unix.Open(filepath.Join(dir, api.StreamDir, id+"."+stream), unix.O_RDONLY|unix.O_NONBLOCK|unix.O_CLOEXEC, 0)
		if err == nil {
			o.fds = append(o.fds, fd)
		}
	}
	return o
}

// Close is for an output that is in the log, or of no use. It may be called on
// nil, and again.
func (o *Output) Close() {
	if o == nil {
		return
	}
	for _, fd := range o.fds {
		_ = unix.Close(fd)
	}
	o.fds = nil
}
