package client

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/shim/api"
)

// peer is the process at the other end of a connection. One that hangs is
// killed: its successor adopts what it held.
type peer struct {
	dir    string
	answer *atomic.Int64 // how long a call may take, as a time.Duration; nil: no limit
	pid    int
	pidfd  *os.File
	asking sync.Mutex // held while it is asked whether it hangs

	answered atomic.Pointer[time.Time] // when it last did, after being asked whether it hangs
}

// newPeer finds the process that listens (SO_PEERCRED of unix(7)).
func newPeer(conn *net.UnixConn, dir string, answer *atomic.Int64) (*peer, error) {
	raw, err := conn.SyscallConn()
	if err != nil {
		return nil, err
	}
	var peerErr error
	pid, fd := 0, -1
	err = raw.Control(func(socket uintptr) {
		var credentials *unix.Ucred
		if credentials, peerErr = unix.GetsockoptUcred(int(socket), unix.SOL_SOCKET, unix.SO_PEERCRED); peerErr == nil {
			pid = int(credentials.Pid)
			fd, peerErr = unix.PidfdOpen(pid, 0)
		}
	})
	if err = errors.Join(err, peerErr); err != nil {
		return nil, fmt.Errorf("find the process that serves %s: %w: %w", dir, ErrLost, err)
	}
	return &peer{dir: dir, answer: answer, pid: pid, pidfd: os.NewFile(uintptr(fd), "supervisor")}, nil
}

func (p *peer) close() error { return p.pidfd.Close() }

// limit is how long a call may take now, 0 for no limit.
func (p *peer) limit() time.Duration {
	if p.answer == nil {
		return 0
	}
	return time.Duration(p.answer.Load())
}

// watch is around each call: one that takes half of the limit has the supervisor
// asked whether it answers at all, within the other half. A call may have its
// reasons to take long, such as a hook that runs.
func (p *peer) watch(ctx context.Context, request *ttrpc.Request, response *ttrpc.Response, _ *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
	if limit := p.limit(); limit > 0 {
		late := time.AfterFunc(limit/2, p.killIfHung)
		defer late.Stop()
	}
	return invoke(ctx, request, response)
}

// attend is for a call that takes as long as a program runs, and so has no limit of
// its own: until over is called the supervisor is asked every now and then for an
// answer to something simple, and killed when it gives none.
func (p *peer) attend(ctx context.Context) (over func()) {
	ctx, cancel := context.WithCancel(ctx)
	if p.limit() > 0 {
		go p.askUntil(ctx.Done()) // ends with it, and with the limits of its questions
	}
	return cancel
}

func (p *peer) askUntil(over <-chan struct{}) {
	for {
		period := p.limit() / 4
		select {
		case <-over:
			return
		case <-time.After(period):
		}
		if last := p.answered.Load(); last == nil || time.Since(*last) >= period {
			p.killIfHung()
		}
	}
}

// mostQuestions is how often a supervisor is asked that works and does not answer.
const mostQuestions = 4

// killIfHung kills a supervisor that does not answer the simplest call either. One that
// uses a processor meanwhile has much to do, or a machine that has: it is asked again,
// but not without end.
func (p *peer) killIfHung() {
	limit := p.limit()
	if limit == 0 || !p.asking.TryLock() {
		return
	}
	defer p.asking.Unlock()
	for range mostQuestions {
		before := p.cpuTime()
		if !p.silent(limit / 2) {
			return
		}
		if p.cpuTime()-before < limit/200 { // a hundredth of the time: what the question costs is far less
			break
		}
	}
	raw, err := p.pidfd.SyscallConn()
	if err != nil {
		return
	}
	_ = raw.Control(func(fd uintptr) { _ = unix.PidfdSendSignal(int(fd), unix.SIGKILL, nil, 0) })
}

// silent asks the supervisor, over a connection of its own, and reports whether it
// gives no answer within the limit. One that has ended is not silent.
func (p *peer) silent(limit time.Duration) bool {
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	defer cancel()
	conn, err := dialPatiently(ctx, p.dir+"/"+api.ControlSocket)
	if err != nil {
		return ctx.Err() != nil
	}
	client := ttrpc.NewClient(conn)
	defer client.Close()
	_, err = api.NewShimClient(client).List(ctx, &api.Empty{})
	if err != nil && ctx.Err() != nil {
		return true
	}
	now := time.Now()
	p.answered.Store(&now)
	return false
}

// dialPatiently waits for a place where as many connections wait to be accepted as the
// kernel keeps (EAGAIN of connect(2)).
func dialPatiently(ctx context.Context, path string) (conn *net.UnixConn, err error) {
	for {
		if conn, err = dialSocket(ctx, path); !errors.Is(err, unix.EAGAIN) {
			return conn, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(dialInterval):
		}
	}
}

// dialInterval is between two attempts to connect.
const dialInterval = 10 * time.Millisecond

// cpuTime is how long the supervisor has been on a processor (clock_getcpuclockid(3)),
// 0 if it has ended.
func (p *peer) cpuTime() time.Duration {
	const scheduled = 2 // CPUCLOCK_SCHED of the kernel's linux/posix-timers.h
	var used unix.Timespec
	if err := unix.ClockGettime(int32(^p.pid<<3|scheduled), &used); err != nil {
		return 0
	}
	return time.Duration(used.Nano())
}
