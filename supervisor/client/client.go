// Package client is the daemon's side of a supervisor (minicri-shim serve): it starts the process, speaks its
// protocol and maps its errors to errdefs kinds. ErrLost says that the connection is gone, and
// errdefs.ErrUnavailable of Connect that none serves: StartSupervisor starts another one there, which adopts the
// containers. A Set has the connections of all supervisors; it says which is lost, and Ensure replaces it.
//
// Many goroutines may use a Client. Its calls share one connection. Each exec, stream of a container, the events, and
// watch's question have a connection of their own.
package client

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
)

// Limits and pauses of the daemon's side, beside process.KillLimit.
const (
	startLimit  = 10 * time.Second       // for a supervisor to start
	EndLimit    = 10 * time.Second       // for a supervisor to end the exec of a client that left
	execSlack   = 5 * time.Second        // for a supervisor to end an exec after its time-out
	minBack     = 100 * time.Millisecond // between two starts of a supervisor that does not start; it doubles
	maxBack     = 5 * time.Second
	endingLimit = 2 * time.Second       // for a supervisor that holds the lock and does not answer to end by itself
	greetLimit  = time.Second           // for the answer to greet
	lastWords   = time.Second           // to read the last answers of a supervisor that has ended
	logPeriod   = 2 * time.Second       // between two looks at the supervisors' logs
	queuePause  = 10 * time.Millisecond // between two tries to connect while a supervisor's queue is full
	noLimit     = time.Hour             // for a supervisor's answer, where none is set
	// RetryPause is the pause between two tries to reach a supervisor while another takes its place.
	RetryPause = 20 * time.Millisecond
)

// Client talks to one supervisor. Most of its methods are the calls of shim.proto; methods of the same names
// answer them (service.go of package serve). Their errors are errdefs kinds.
type Client struct {
	host       Host
	dir        string
	conn       Conn
	rpc        api.ShimClient // conn
	supervisor Process
	closed     chan struct{} // closed when the connection is
	protocol   uint32        // that the supervisor speaks

	life context.Context // ends with Close, or a second after the supervisor
	over context.CancelFunc
}

// ErrLost, an errdefs.ErrUnavailable, says that the connection to a supervisor is gone.
var ErrLost = fmt.Errorf("the supervisor has ended, and another one takes its place: try again: %w", errdefs.ErrUnavailable)

// Connect connects to the supervisor of dir. errdefs.ErrUnavailable says that none serves. A supervisor
// that does not answer within the limit is killed; 0 is noLimit.
func Connect(ctx context.Context, dir string, limit *atomic.Int64) (*Client, error) {
	return connect(ctx, Processes{}, dir, limit)
}

func connect(ctx context.Context, host Host, dir string, limit *atomic.Int64) (*Client, error) {
	c := &Client{host: host, dir: dir, closed: make(chan struct{}), protocol: api.Protocol}
	conn, err := host.Dial(ctx, dir, func() { close(c.closed) })
	if err != nil {
		return nil, err
	}
	supervisor, err := conn.Peer()
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	if about, err := api.ReadAbout(dir); err == nil && about != nil {
		c.protocol = about.Protocol
	}
	c.conn, c.rpc, c.supervisor = conn, conn, supervisor
	c.life, c.over = context.WithCancel(context.Background())
	context.AfterFunc(c.life, func() { _ = c.conn.Close() })
	go func() { // the connection may outlive the supervisor, as a child may have a copy of its socket
		if supervisor.Wait() == nil { // not closed
			time.AfterFunc(lastWords, c.over)
		}
	}()
	go c.watch(limit) // ends with the supervisor, or Close
	return c, nil
}

// watch asks the supervisor at once and every half of a limit, and kills it if it does not answer within the limit.
func (c *Client) watch(limit *atomic.Int64) {
	for pause := time.Duration(0); ; {
		within := cmp.Or(time.Duration(limit.Load()), noLimit)
		select {
		case <-c.life.Done():
			return
		case <-time.After(min(pause, within/2)):
		}
		pause = noLimit
		ctx, cancel := context.WithTimeout(c.life, within)
		// By a connection of its own: on one full of unread calls, ttrpc waits without a limit.
		call, done, err := c.open(ctx)
		for errors.Is(err, unix.EAGAIN) && ctx.Err() == nil { // its queue is full (connect(2))
			time.Sleep(queuePause)
			call, done, err = c.open(ctx)
		}
		if err == nil {
			_, err = call.UseProgram(ctx, &api.UseProgramRequest{})
			done()
		}
		if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
			if c.supervisor.Kill(process.KillLimit) != nil && c.supervisor.Doomed() {
				c.over() // the kernel keeps it, so its pidfd does not tell of its end
			}
		}
		cancel()
	}
}

// greet hands a supervisor the program for its starters. One that is about to end closes new connections,
// which is ErrLost; one that says nothing may serve.
func (c *Client) greet(ctx context.Context, options SetOptions) error {
	limited, cancel := context.WithTimeout(ctx, greetLimit)
	defer cancel()
	_, err := c.rpc.UseProgram(limited, &api.UseProgramRequest{Path: options.Start.ForOthers})
	if err = native(err); errdefs.IsUnavailable(err) {
		return err
	}
	if err != nil {
		options.Logger.Warn("a supervisor was not handed this build's program for its starters", "dir", c.dir, "err", err)
	}
	return ctx.Err()
}

// Close closes the connection; the supervisor lives on.
func (c *Client) Close() error {
	c.over()
	return errors.Join(c.conn.Close(), c.supervisor.Close())
}

// broken reports whether the connection is closed, or soon will be because the supervisor has ended.
func (c *Client) broken() bool {
	select {
	case <-c.closed:
		return true
	default:
		return c.supervisor.Ended()
	}
}

// dial connects to another socket of the supervisor.
func (c *Client) dial(ctx context.Context, socket string) (*net.UnixConn, error) {
	return c.host.DialSocket(ctx, c.dir, socket)
}

// open opens a connection for one call that takes as long as a program runs. Closing it ends the call.
func (c *Client) open(ctx context.Context) (call api.ShimClient, done func(), err error) {
	conn, err := c.host.Dial(ctx, c.dir, func() {})
	if err != nil {
		return nil, nil, err
	}
	stop := context.AfterFunc(c.life, func() { _ = conn.Close() })
	return conn, func() {
		stop()
		_ = conn.Close()
	}, nil
}

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

// Delete removes a stopped container, or with kill any. On errdefs.ErrUnavailable call again.
func (c *Client) Delete(ctx context.Context, id string, kill bool) error {
	_, err := c.rpc.Delete(ctx, &api.DeleteRequest{Id: id, Kill: kill})
	return native(err)
}

// List returns all containers, in no order.
func (c *Client) List(ctx context.Context) ([]*api.Container, error) {
	answer, err := c.rpc.List(ctx, &api.Empty{})
	return answer.GetContainers(), native(err)
}

// Resize sets the size of a container's terminal.
func (c *Client) Resize(ctx context.Context, id string, width, height uint32) error {
	_, err := c.rpc.Resize(ctx, &api.ResizeRequest{Id: id, Width: width, Height: height})
	return native(err)
}

// ReopenLog continues in a new file at the log's path.
func (c *Client) ReopenLog(ctx context.Context, id string) error {
	_, err := c.rpc.ReopenLog(ctx, &api.ReopenLogRequest{Id: id})
	return native(err)
}

// Update sets the named resources, and oom_score_adj if it is not nil; all or with an error none.
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

// NoteExit passes on wait4(2)'s status of an adopted container's init, which the caller has reaped.
func (c *Client) NoteExit(ctx context.Context, id string, pid int, startTime uint64, status uint32) error {
	_, err := c.rpc.NoteExit(ctx, &api.NoteExitRequest{Id: id, Pid: int32(pid), StartTime: startTime, Status: status})
	return native(err)
}

// Shutdown ends the supervisor. It fails with errdefs.ErrFailedPrecondition while there are containers.
func (c *Client) Shutdown(ctx context.Context) error {
	_, err := c.rpc.Shutdown(ctx, &api.Empty{})
	if err = native(err); errdefs.IsUnavailable(err) {
		return nil // it ended before it could answer
	}
	return err
}

// Events calls each for every event after a sequence number (0: all that are kept), until ctx ends, each
// fails or the supervisor is gone. A gap in the numbers says that events were dropped: List then.
func (c *Client) Events(ctx context.Context, after uint64, each func(*api.Event) error) error {
	call, done, err := c.open(ctx)
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

// Held keeps a container's output and exit status while its supervisor is dead: the kernel drops the content of a fifo
// that nobody has open, and the status of a reaped process that nobody has a pidfd of.
type Held struct {
	fifos map[string]int   // by path; not in Go's poller, which each write would wake
	init  *process.Process // nil if it had ended
}

// Hold opens the first process of a container, and its fifos, if it has any, in the pod's directory or, as of an older
// supervisor, in the supervisor's.
func Hold(podDir, supervisorDir, id string, init process.Facts) *Held {
	h := &Held{fifos: make(map[string]int)}
	for _, dir := range []string{podDir, filepath.Join(supervisorDir, api.StreamDir)} {
		for _, stream := range []string{api.Stdout, api.Stderr} {
			path := filepath.Join(dir, id+"."+stream)
			if fd, err := openFifo(path); err == nil {
				h.fifos[path] = fd
			}
		}
	}
	h.init, _ = process.Open(init) // without it, as before Linux 6.15, a killed supervisor's exit codes are lost
	return h
}

// openFifo opens nothing else: a container of the pod may have replaced it.
func openFifo(path string) (int, error) {
	fd, err := unix.Open(path, unix.O_RDONLY|unix.O_NONBLOCK|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
	if err != nil {
		return -1, err
	}
	var stat unix.Stat_t
	if err := unix.Fstat(fd, &stat); err != nil || stat.Mode&unix.S_IFMT != unix.S_IFIFO {
		return -1, errors.Join(fmt.Errorf("%s is no fifo", path), err, unix.Close(fd))
	}
	return fd, nil
}

// Exit returns how the first process ended, once it has been reaped, from Linux 6.15 on.
func (h *Held) Exit() (status unix.WaitStatus, known bool) {
	if h == nil || h.init == nil {
		return 0, false
	}
	return h.init.KernelExit()
}

// Release is for a container that has ended. It keeps fifos that exist: the supervisor removes them once the log has all.
func (h *Held) Release() { h.release(exists) }

// Close is for a container that is removed. It may be repeated, and called on nil, as Release may.
func (h *Held) Close() { h.release(func(string) bool { return false }) }

func (h *Held) release(but func(path string) bool) {
	if h == nil {
		return
	}
	for path, fd := range h.fifos {
		if !but(path) {
			_ = unix.Close(fd)
			delete(h.fifos, path)
		}
	}
	if h.init != nil {
		_ = h.init.Close()
		h.init = nil
	}
}

func exists(path string) bool {
	_, err := os.Lstat(path)
	return !errors.Is(err, fs.ErrNotExist)
}
