package client

import (
	"context"
	"sync/atomic"
	"testing"
	"time"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/test/harness"
)

// hanging is a supervisor that answers nothing until it is killed.
type hanging struct {
	asked  chan struct{} // gets the first question
	killed chan struct{}
}

type hangingHost struct {
	Host
	hanging
}

func (h hangingHost) Dial(context.Context, string, func()) (Conn, error) {
	return hangingConn{hanging: h.hanging}, nil
}

type hangingConn struct {
	api.ShimClient
	hanging
}

func (c hangingConn) Peer() (Process, error) { return hangingProcess{c.hanging}, nil }
func (c hangingConn) Close() error           { return nil }

func (c hangingConn) UseProgram(ctx context.Context, _ *api.UseProgramRequest) (*api.Empty, error) {
	select {
	case c.asked <- struct{}{}:
	default:
	}
	<-ctx.Done()
	return nil, ctx.Err()
}

type hangingProcess struct{ hanging }

func (p hangingProcess) Ended() bool  { return false }
func (p hangingProcess) Doomed() bool { return false }
func (p hangingProcess) Close() error { return nil }

func (p hangingProcess) Wait() error {
	<-p.killed
	return nil
}

func (p hangingProcess) Kill(time.Duration) error {
	select {
	case <-p.killed: // the client continues for a second
	default:
		close(p.killed)
	}
	return nil
}

// The daemon checks a supervisor at once, not after a half of the limit: with the first limit this test would end
// before. A supervisor that hangs is killed at the limit.
func TestSupervisorIsCheckedAtOnce(t *testing.T) {
	for _, within := range []time.Duration{24 * time.Hour, time.Millisecond} {
		s := hanging{asked: make(chan struct{}, 1), killed: make(chan struct{})}
		limit := new(atomic.Int64)
		limit.Store(int64(within))
		c, err := connect(t.Context(), hangingHost{hanging: s}, t.TempDir(), limit)
		harness.Check(t, err)
		<-s.asked
		if within < time.Hour {
			<-s.killed
			<-c.life.Done()
		}
		harness.Check(t, c.Close())
	}
}
