package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
)

// peer is the process at the other end of a connection. One that hangs is
// killed: its successor adopts what it held.
type peer struct {
	*process.Process
	dir    string
	answer *atomic.Int64 // how long a call may take, as a time.Duration; nil: no limit

	asking   sync.Mutex // held while it is asked whether it hangs
	answered time.Time  // when it last did; guarded by asking
}

// newPeer finds the process that listens (SO_PEERCRED of unix(7)). It has the lock of
// its directory, so it is not another one that was given its pid.
func newPeer(conn *net.UnixConn, dir string, answer *atomic.Int64) (*peer, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var credentials *unix.Ucred
	var asked error
	err = raw.Control(func(socket uintptr) {
		credentials, asked = unix.GetsockoptUcred(int(socket), unix.SOL_SOCKET, unix.SO_PEERCRED)
	})
	if err = errors.Join(err, asked); err != nil {
		return nil, fmt.Errorf("find the process that serves %s: %w", dir, err)
	}
	listens, err := process.Find(int(credentials.Pid))
	if err != nil {
		return nil, fmt.Errorf("find the process that serves %s: %w: %w", dir, ErrLost, err)
	}
	if holder, err := api.LockHolder(dir); err != nil || holder != listens.PID {
		return nil, errors.Join(fmt.Errorf("process %d listens in %s and does not have its lock: %w", listens.PID, dir, ErrLost), err, listens.Close())
	}
	return &peer{Process: listens, dir: dir, answer: answer}, nil
}

// limit is how long a call may take now, 0 for no limit.
func (p *peer) limit() time.Duration {
	if p.answer == nil {
		return 0
	}
	return time.Duration(p.answer.Load())
}

// watch is around each unary call.
func (p *peer) watch(ctx context.Context, request *ttrpc.Request, response *ttrpc.Response, _ *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
	defer p.attend(ctx)()
	return invoke(ctx, request, response)
}

// attend is for a call that may have its reasons to take long, such as a hook that runs:
// as long as it is not over, the supervisor is asked every half of the limit whether it
// answers at all.
func (p *peer) attend(ctx context.Context) (over func()) {
	ctx, over = context.WithCancel(ctx)
	if p.limit() > 0 {
		go func() { // ends with the call, and the limit of a question
			for {
				select {
				case <-ctx.Done():
					return
				case <-time.After(p.limit() / 2):
					p.killIfHung()
				}
			}
		}()
	}
	return over
}

// killIfHung kills a supervisor that does not answer the simplest call within the limit.
func (p *peer) killIfHung() {
	limit := p.limit()
	if limit == 0 || !p.asking.TryLock() {
		return
	}
	defer p.asking.Unlock()
	if time.Since(p.answered) < limit/2 {
		return // to another call's question
	}
	if p.silent(limit) {
		_ = p.Kill(0) // that it has not ended at once is no news
		return
	}
	p.answered = time.Now()
}

// silent asks the supervisor, over a connection of its own, and reports whether it
// gives no answer within the limit. One that has ended is not silent.
func (p *peer) silent(limit time.Duration) bool {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	conn, err := dialSocket(ctx, filepath.Join(p.dir, api.ControlSocket))
	for errors.Is(err, unix.EAGAIN) && ctx.Err() == nil { // as many wait to be accepted as the kernel keeps (connect(2))
		time.Sleep(dialInterval)
		conn, err = dialSocket(ctx, filepath.Join(p.dir, api.ControlSocket))
	}
	if err != nil {
		return errors.Is(err, unix.EAGAIN) || isTimeout(err)
	}
	client := ttrpc.NewClient(conn)
	defer client.Close()
	_, err = api.NewShimClient(client).List(ctx, &api.Empty{})
	return isTimeout(err)
}

// isTimeout reports whether an error is for the end of a limit, of which package net
// may know before a context does.
func isTimeout(err error) bool {
	var timeout interface{ Timeout() bool }
	return errors.As(err, &timeout) && timeout.Timeout()
}

// dialInterval is between two attempts to connect.
const dialInterval = 10 * time.Millisecond
