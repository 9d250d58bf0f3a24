package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"

	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"github.com/minicri/minicri/shim/api"
)

// Client talks to one shim. Its Shim has the calls of the protocol, see
// shim.proto; their errors are errdefs kinds.
type Client struct {
	Shim
	dir  string
	conn *ttrpc.Client
}

// Connect connects to the shim that serves dir. errdefs.ErrUnavailable says
// that there is none: Start one.
func Connect(ctx context.Context, dir string) (*Client, error) {
	conn, err := dial(ctx, dir)
	if err != nil {
		return nil, err
	}
	return &Client{Shim: Shim{api.NewShimClient(conn)}, dir: dir, conn: conn}, nil
}

// Close closes the connection; the shim lives on.
func (c *Client) Close() error { return c.conn.Close() }

// Lost is closed when the shim, or the connection to it, is gone.
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
		return fmt.Errorf("the shim is gone, start another one on its directory: %w: %w", errdefs.ErrUnavailable, err)
	case errors.Is(err, context.Canceled), errors.Is(err, context.DeadlineExceeded):
		return err
	}
	return errgrpc.ToNative(err)
}
