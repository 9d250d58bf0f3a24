package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/supervisor/api"
)

// Host starts the supervisors of a node and connects to them. Processes implements it.
type Host interface {
	// Dial connects to the supervisor of dir, or returns errdefs.ErrUnavailable. It calls closed when the connection
	// ends.
	Dial(ctx context.Context, dir string, closed func()) (Conn, error)
	// DialSocket connects to another socket of the supervisor of dir, for one stream or exec.
	DialSocket(ctx context.Context, dir, socket string) (*net.UnixConn, error)
	// LockHolder returns the pid of the process that has dir locked, or 0. EndLockHolder ends it if it is a supervisor.
	LockHolder(dir string) (pid int, err error)
	EndLockHolder(dir string) error
	// Start returns when the new supervisor serves.
	Start(ctx context.Context, options StartOptions) error
}

// Conn is a connection to a supervisor.
type Conn interface {
	api.ShimClient
	// Peer returns the supervisor's process, which the caller closes.
	Peer() (Process, error)
	Close() error
}

// Process is the process of a supervisor. process.Process implements it.
type Process interface {
	Wait() error
	Ended() bool
	Doomed() bool
	Kill(limit time.Duration) error
	Close() error
}

// Processes are the supervisors of this node: minicri-shim behind sockets.
type Processes struct{}

// Dial implements Host.
func (Processes) Dial(ctx context.Context, dir string, closed func()) (Conn, error) {
	conn, err := dialSocket(ctx, filepath.Join(dir, api.ControlSocket))
	if err != nil {
		return nil, err
	}
	client := ttrpc.NewClient(conn, ttrpc.WithOnClose(closed))
	return &socketConn{api.NewShimClient(client), client, conn, dir}, nil
}

// DialSocket implements Host.
func (Processes) DialSocket(ctx context.Context, dir, socket string) (*net.UnixConn, error) {
	return dialSocket(ctx, filepath.Join(dir, socket))
}

// LockHolder implements Host.
func (Processes) LockHolder(dir string) (pid int, err error) { return api.LockHolder(dir) }

// EndLockHolder implements Host.
func (Processes) EndLockHolder(dir string) error { return endHolder(dir) }

// Start implements Host.
func (Processes) Start(ctx context.Context, options StartOptions) error {
	return StartSupervisor(ctx, options)
}

type socketConn struct {
	api.ShimClient
	client *ttrpc.Client
	conn   *net.UnixConn
	dir    string
}

func (c *socketConn) Close() error { return c.client.Close() }

// Peer finds the process that listens. It must have the lock, so its pid is not reused.
func (c *socketConn) Peer() (Process, error) {
	peer, err := socket.Peer(c.conn)
	if err != nil {
		return nil, fmt.Errorf("find the process that serves %s: %w", c.dir, err)
	}
	listens, err := process.Find(int(peer.Pid))
	if err != nil {
		return nil, fmt.Errorf("find the process that serves %s: %w: %w", c.dir, ErrLost, err)
	}
	if holder, err := api.LockHolder(c.dir); err != nil || holder != listens.PID || listens.Doomed() {
		err = errors.Join(fmt.Errorf("process %d listens in %s and does not have its lock, or was killed: %w",
			listens.PID, c.dir, ErrLost), err, listens.Close())
		return nil, err
	}
	return listens, nil
}

func dialSocket(ctx context.Context, path string) (*net.UnixConn, error) {
	conn, err := new(net.Dialer).DialContext(ctx, "unix", path)
	if err != nil {
		return nil, fmt.Errorf("no supervisor serves %s, start one: %w: %w", path, errdefs.ErrUnavailable, err)
	}
	return conn.(*net.UnixConn), nil
}
