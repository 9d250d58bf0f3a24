package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"github.com/minicri/minicri/supervisor/api"
)

// Client talks to one supervisor. Its Shim has the calls of the protocol, see
// shim.proto; their errors are errdefs kinds.
type Client struct {
	Shim
	dir  string
	conn *ttrpc.Client
	peer *peer

	closed chan struct{} // closed when the connection is
	lost   chan struct{} // closed when the supervisor has ended
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
	c.Shim = Shim{api.NewShimClient(c.conn)}
	go c.await() // ends with the supervisor, or Close
	return c, nil
}

// await ends the connection of a supervisor that has ended. A child of it may have a
// copy of the socket, which keeps the connection.
func (c *Client) await() {
	if c.peer.Wait() != nil {
		return // closed
	}
	close(c.lost)
	select {
	case <-c.closed:
	case <-time.After(lostGrace):
		_ = c.conn.Close()
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
// ends with the supervisor, too.
func (c *Client) open(ctx context.Context) (_ context.Context, call api.ShimClient, done func(), err error) {
	conn, err := dialSocket(ctx, filepath.Join(c.dir, api.ControlSocket))
	if err != nil {
		return nil, nil, nil, err
	}
	client := ttrpc.NewClient(conn)
	ctx, cancel := context.WithCancel(ctx)
	go func() { // ends with the call or the supervisor
		select {
		case <-ctx.Done():
			return
		case <-c.lost:
		}
		select {
		case <-ctx.Done():
		case <-time.After(lostGrace):
			_ = client.Close()
		}
	}()
	over := c.peer.attend(ctx)
	return ctx, api.NewShimClient(client), func() {
		over()
		cancel()
		_ = client.Close()
	}, nil
}

func dialSocket(ctx context.Context, path string) (*net.UnixConn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("no shim serves %s, start one: %w: %w", path, errdefs.ErrUnavailable, err)
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
