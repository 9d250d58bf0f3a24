// Package starter runs each operation in a container in its own process. A starter does one [Request], with
// libcontainer or by a runtime, a program with runc's command line, answers, and ends. A container, a hook or a
// runtime can only hold up this operation.
//
// One starter waits ready ([Starters]). Its only descriptors are a socket, /dev/null and those of its request. It is
// the sub-reaper of what it starts: the supervisor owns a process ([process.Parent.Own]) while the starter still
// lives, and inherits it when the starter ends. That is before an init may leave its barrier. The process of
// an exec runs already and may have asked for a signal when its parent ends (PR_SET_PDEATHSIG(2const)), so the starter
// ends after it, and leaves it to the supervisor to reap. A starter that is ended early is ended with all that it has started.
// The supervisor runs [Starters.Run]; package engine, in the starter, serves the request.
//
// Locks: Starters.mu is held for moments, the longest a fork.
package starter

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
)

// Command is the starter's command of minicri-shim.
const Command = "start"

// Starters are the supervisor's starters.
type Starters struct {
	parent *process.Parent
	log    *slog.Logger

	mu      sync.Mutex
	program *os.File // sealed; the daemon's build after Use
	ready   *starter // waits for its request; nil if there is none
	closed  bool
}

// New returns starters of this process's program.
func New(parent *process.Parent, log *slog.Logger) (*Starters, error) {
	self, err := os.Open("/proc/self/exe")
	if err != nil {
		return nil, fmt.Errorf("open the program of starters: %w", err)
	}
	return &Starters{parent: parent, log: log, program: self}, nil
}

// Use starts another program from now on, and owns it.
func (s *Starters) Use(program *os.File) {
	s.mu.Lock()
	s.drop()
	s.program = program
	s.mu.Unlock()
	s.Prepare()
}

// Close ends the starter that waits. Others end with their requests.
func (s *Starters) Close() {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.closed = true
	s.drop()
}

func (s *Starters) drop() {
	if s.ready != nil {
		_ = s.ready.conn.Close()
		s.ready = nil
	}
	_ = s.program.Close()
}

// Prepare starts the starter that waits, unless there is one.
func (s *Starters) Prepare() {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.closed || s.ready != nil {
		return
	}
	var err error
	if s.ready, err = s.start(); err != nil {
		s.log.Warn("no starter waits ready; the next operation starts its own", "error", err)
	}
}

// get returns a starter that waits for its request.
func (s *Starters) get() (*starter, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if ready := s.ready; ready != nil {
		s.ready = nil
		if !ready.child.HasExited() {
			return ready, nil
		}
		_ = ready.conn.Close() // somebody has killed it
	}
	return s.start()
}

// starter is the supervisor's side of a starter.
type starter struct {
	child *process.Child
	conn  *net.UnixConn
}

// start starts a starter; mu is held, for the fork alone.
func (s *Starters) start() (*starter, error) {
	conn, theirs, err := socket.Pair()
	if err != nil {
		return nil, fmt.Errorf("make the socket of a starter: %w", err)
	}
	defer theirs.Close()
	null, err := os.OpenFile(os.DevNull, os.O_RDWR, 0)
	if err != nil {
		return nil, errors.Join(err, conn.Close())
	}
	defer null.Close()
	// The new process has no descriptor of the program.
	program := fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), s.program.Fd())
	// A supervisor that dies while it ends a starter leaves it stopped. The kernel then sends SIGHUP and
	// SIGCONT to its process group, which is orphaned (credentials(7), exit_notify of kernel/exit.c).
	group := &syscall.SysProcAttr{Setpgid: true}
	child, err := s.parent.Start(func() (int, error) {
		return syscall.ForkExec(program, []string{"minicri-shim", Command}, &syscall.ProcAttr{
			Dir: "/", Env: os.Environ(), Files: []uintptr{null.Fd(), null.Fd(), null.Fd(), theirs.Fd()}, Sys: group,
		})
	}, nil)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start a starter: %w: %w", errdefs.ErrUnavailable, err), conn.Close())
	}
	return &starter{child: child, conn: conn}, nil
}

// Run has a starter do the request, with the descriptors. When ctx ends, the starter is ended with all that
// it has started, and the error has the cause. take is called with the answer while the starter, by, still
// lives, and has to own what was made.
func (s *Starters) Run(
	ctx context.Context, request Request, files []*os.File, take func(answer Answer, by *process.Child) error,
) error {
	one, err := s.get()
	if err != nil {
		return err
	}
	go s.Prepare() // now, as this operation mostly waits; it ends with the fork
	defer one.conn.Close()
	stop := context.AfterFunc(ctx, func() { _ = one.conn.SetDeadline(time.Now()) })
	defer stop()
	answer, err := one.ask(request, files)
	if err == nil && answer.Err() != nil {
		return answer.Err() // it ends
	}
	if err == nil && take != nil {
		err = take(answer, one.child)
	}
	if err == nil {
		_, err = one.conn.Write([]byte(Taken))
	}
	if err == nil {
		return nil
	}
	one.end()
	if ctx.Err() != nil {
		err = fmt.Errorf("%s of container %s was not done in time, and was ended: %w", request.Verb, request.ID, context.Cause(ctx))
	}
	return err
}

// ask sends the request and waits for the answer.
func (p *starter) ask(request Request, files []*os.File) (answer Answer, err error) {
	if err := socket.SendMessage(p.conn, request, files...); err != nil {
		return answer, fmt.Errorf("%s of container %s: send the request to the starter: %w", request.Verb, request.ID, err)
	}
	unasked, _, err := socket.ReceiveMessage(p.conn, &answer)
	socket.CloseAll(unasked...)
	if err != nil {
		return answer, fmt.Errorf("%s of container %s: its starter has ended without an answer: %w: %w", request.Verb, request.ID, errdefs.ErrUnavailable, err)
	}
	return answer, nil
}

// end kills the starter with all that it has started and not handed over.
func (p *starter) end() {
	if p.child.HasExited() {
		return
	}
	process.KillTree(p.child.PID)
	select {
	case <-p.child.Exited():
	case <-time.After(process.KillLimit): // in uninterruptible sleep; it is reaped when it ends
	}
}
