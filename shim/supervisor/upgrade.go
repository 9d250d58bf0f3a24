package supervisor

import (
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
)

// An upgrade replaces the program of this process by another build: the same
// pid, so that containers stay its children and their exits are seen. The new
// program first looks at all that it will be given, as a process of its own, beside
// calls; what it cannot read, or a crash, refuses the upgrade. Then nothing new begins
// (changes), no byte is between a fifo and its log (journal.Move), the
// descriptors that only we have are made to outlive execve(2), and the new build
// adopts the containers from the disk, as after a death, but as their parent and
// with their terminals and inputs. If it ends before it serves, or hangs, a
// standby of this build serves on.
const (
	// quietLimit is how long what is under way may take to end.
	quietLimit = 5 * time.Second
	// checkLimit is how long the new build may look at the state.
	checkLimit = 10 * time.Second
	quietPause = time.Millisecond
)

// upgrade does not return unless it fails; then nothing has changed.
func (s *Supervisor) upgrade(ctx context.Context, path, build string) error {
	if !s.upgrading.TryLock() {
		return fmt.Errorf("another upgrade is under way: %w", errdefs.ErrUnavailable)
	}
	defer s.upgrading.Unlock()
	program, err := os.Open(path)
	if err != nil {
		return fmt.Errorf("open the new program: %w", err)
	}
	defer program.Close()
	if err := s.check(ctx, program); err != nil {
		return err
	}
	if err := s.awaitQuiet(); err != nil {
		return err
	}
	defer s.changes.Unlock()
	h, kept, err := s.prepare()
	defer closeDescriptors(kept)
	if err != nil {
		return err
	}
	waits, err := s.startStandby(h, kept)
	if err != nil {
		return err
	}
	defer s.dismiss(waits)
	s.endExecs()
	if err := lockWithin(&s.journal.Move, quietLimit); err != nil {
		return fmt.Errorf("a log takes no output for %v: %w", quietLimit, err)
	}
	defer s.journal.Move.Unlock()
	return s.execute(program, build, h, kept, waits)
}

// awaitQuiet locks changes.
func (s *Supervisor) awaitQuiet() error {
	if err := lockWithin(&s.changes, quietLimit); err != nil {
		return fmt.Errorf("an operation on a container is not done within %v: %w", quietLimit, err)
	}
	return nil
}

// lockWithin locks, without keeping readers out while it waits.
func lockWithin(lock *sync.RWMutex, limit time.Duration) error {
	for deadline := time.Now().Add(limit); !lock.TryLock(); time.Sleep(quietPause) {
		if time.Now().After(deadline) {
			return errdefs.ErrUnavailable
		}
	}
	return nil
}

// endExecs ends the execs of a daemon that is gone: the daemon that asks for an upgrade
// has started none yet, or has not waited for an upgrade that took long, which ends its
// connection.
func (s *Supervisor) endExecs() {
	all := s.all()
	several(mostSettled, len(all), func(i int) { _ = all[i].endExecs() })
}

// prepare makes copies of the descriptors that the next build is given.
func (s *Supervisor) prepare() (h *handover, kept []int, err error) {
	h = &handover{Version: handoverVersion, Containers: make(map[string]handedOn)}
	keep := func(from syscall.Conn, to *int) {
		if err != nil {
			return
		}
		if *to, err = duplicate(from); err == nil && *to > 0 { // one that is closed is none
			kept = append(kept, *to)
		}
	}
	keep(s.lock, &h.Lock)
	keep(s.control.(*net.UnixListener), &h.Control)
	keep(s.streams.(*net.UnixListener), &h.Streams)
	for _, c := range s.all() {
		handed := c.handOn()
		if streams := c.streams(); streams != nil {
			if stdin := streams.Stdin(); stdin != nil && stdin != streams.Terminal() {
				keep(stdin, &handed.Stdin)
			}
			if terminal := streams.Terminal(); terminal != nil {
				keep(terminal, &handed.Terminal)
			}
		}
		h.Containers[c.record.ID] = handed
	}
	return h, kept, err
}

func (c *container) handOn() handedOn {
	c.mu.Lock()
	defer c.mu.Unlock()
	return handedOn{StdinOnce: c.stdinOnce, Killed: c.killed, Adopted: c.adopted}
}

// duplicate copies a descriptor. No program that is started at that moment inherits the
// copy (outliveExec): the write end of an input would keep it from ending. One that
// is closed, a terminal that has ended for example, is none.
func duplicate(from syscall.Conn) (fd int, err error) {
	raw, err := from.SyscallConn()
	if errors.Is(err, os.ErrClosed) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	var dupErr error
	err = raw.Control(func(old uintptr) { fd, dupErr = unix.FcntlInt(old, unix.F_DUPFD_CLOEXEC, 3) })
	if err != nil { // it is closed: os has another error for that than os.ErrClosed here
		return 0, nil
	}
	return fd, os.NewSyscallError("fcntl", dupErr)
}

func closeDescriptors(fds []int) {
	for _, fd := range fds {
		_ = unix.Close(fd)
	}
}

// check has the new program look at the state as it is now. Containers change while it
// does: what comes to be then has the same form, and a program that hangs holds up none.
func (s *Supervisor) check(ctx context.Context, program *os.File) error {
	if err := s.awaitQuiet(); err != nil {
		return err
	}
	h, kept, err := s.prepare()
	s.changes.Unlock()
	// It is told their numbers and given none: a copy of an input would keep it from
	// ending meanwhile.
	closeDescriptors(kept)
	if err != nil {
		return err
	}
	state, err := writeHandover(h)
	if err != nil {
		return err
	}
	defer state.Close()
	ctx, cancel := context.WithTimeout(ctx, checkLimit)
	defer cancel()
	said, err := s.builtin.Ask(ctx, program, state, programName, "check-state", "--dir", s.dir, "--handover-fd", "3")
	if err != nil && errors.Is(ctx.Err(), context.DeadlineExceeded) {
		err = fmt.Errorf("no answer within %v", checkLimit)
	}
	if err != nil {
		const most = 1024
		text := strings.TrimSpace(string(said[max(0, len(said)-most):]))
		return fmt.Errorf("the new build cannot take over the state: %w: %s: %w", err, text, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// programName is what the program calls itself.
const programName = "minicri-shim"

// execute becomes the new program, which says over a descriptor that it serves.
// It returns only with an error.
func (s *Supervisor) execute(program *os.File, build string, h *handover, kept []int, waits *standby) error {
	h.PausedAt = int64(monotonic())
	state, err := writeHandover(h)
	if err != nil {
		return err
	}
	defer state.Close()
	if err := outliveExec(append(kept, waits.serve, int(state.Fd()))); err != nil {
		return err
	}
	if _, err := unix.Write(waits.serve, []byte(executes)); err != nil {
		return fmt.Errorf("have the standby watch the new program: %w", err)
	}
	arguments := append(s.serveArguments(build, int(state.Fd())), "--ready-fd", strconv.Itoa(waits.serve))
	err = syscall.Exec("/proc/self/fd/"+strconv.Itoa(int(program.Fd())), arguments, os.Environ())
	return fmt.Errorf("execute the new program: %w", err)
}

// outliveExec has descriptors outlive execve(2). If that fails they are closed.
func outliveExec(fds []int) error {
	for _, fd := range fds {
		if _, err := unix.FcntlInt(uintptr(fd), unix.F_SETFD, 0); err != nil {
			return os.NewSyscallError("fcntl", err)
		}
	}
	return nil
}
