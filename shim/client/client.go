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
	"github.com/minicri/minicri/shim/api"
)

// Client talks to one supervisor. Its Shim has the calls of the protocol, see
// shim.proto; their errors are errdefs kinds.
type Client struct {
	Shim
	dir  string
	conn *ttrpc.Client
	peer *peer
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
	client := ttrpc.NewClient(conn, ttrpc.WithUnaryClientInterceptor(p.watch))
	return &Client{Shim: Shim{api.NewShimClient(client)}, dir: dir, conn: client, peer: p}, nil
}

// greetLimit is how long greet waits: a connection that is refused is closed at
// once.
const greetLimit = time.Second

// greet makes sure that the supervisor serves: one that is about to end closes
// new connections, which is ErrLost. One that says nothing, or is
// of an older build that knows no Info, may serve.
func (c *Client) greet(ctx context.Context) error {
	limited, cancel := context.WithTimeout(ctx, greetLimit)
	defer cancel()
	if _, err := c.Info(limited); errdefs.IsUnavailable(err) {
		return err
	}
	return ctx.Err()
}

// Close closes the connection; the supervisor lives on.
func (c *Client) Close() error { return errors.Join(c.conn.Close(), c.peer.close()) }

// Lost is closed when the supervisor, or the connection to it, is gone.
func (c *Client) Lost() <-chan struct{} {
	lost := make(chan struct{})
	go func() {
		defer close(lost)
		_ = c.conn.UserOnCloseWait(context.Background()) // ends with the connection
	}()
	return lost
}

func dial(ctx context.Context, dir string) (*ttrpc.Client, error) {
	conn, err := dialSocket(ctx, filepath.Join(dir, api.ControlSocket))
	if err != nil {
		return nil, err
	}
	return ttrpc.NewClient(conn), nil
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
