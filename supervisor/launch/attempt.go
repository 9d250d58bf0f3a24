package launch

import (
	"context"
	"encoding/binary"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"slices"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
)

// The descriptors of the first process besides its streams; more follow.
const (
	socketFD  = 3 // gets the list, and answers
	lifeFD    = 4 // ends when the supervisor has ended
	programFD = 5
)

// attempt is one launch: its list, and what is made for it.
type attempt struct {
	calls
	launcher *Launcher
	files    []*os.File // the descriptors of the first process, by their numbers
	toClose  []io.Closer

	ours    *net.UnixConn
	parents []*os.File // pidfds of the first process and of the helper
	parent  int        // the pid of the last of them
	made    *Launched  // the process; nil before its pid is known
	barrier bool       // there is an exec barrier
	waiting string     // for what
}

// newAttempt opens what each first process gets. The caller calls end. A stream that is nil
// is at its end once the attempt is.
func (l *Launcher) newAttempt(streams [3]*os.File) (_ *attempt, err error) {
	a := &attempt{launcher: l, waiting: "its first process"}
	defer func() {
		if err != nil {
			a.closeAll()
		}
	}()
	alive, life, err := os.Pipe()
	if err != nil {
		return nil, err
	}
	a.toClose = append(a.toClose, alive, life)
	for _, stream := range streams {
		if stream == nil {
			stream = alive
		}
		a.files = append(a.files, stream)
	}
	ours, theirs, err := socket.Pair()
	if err != nil {
		return nil, err
	}
	a.ours, a.toClose = ours, append(a.toClose, ours, theirs)
	program, err := l.program()
	a.files = append(a.files, theirs, alive, program)
	return a, err
}

// give opens a further descriptor of the first process, and returns its number.
func (a *attempt) give(file *os.File, err error) (number uint64, _ error) {
	if err != nil {
		return 0, err
	}
	a.toClose = append(a.toClose, file)
	a.files = append(a.files, file)
	return uint64(len(a.files) - 1), nil
}

func (a *attempt) closeAll() {
	for _, c := range a.toClose {
		_ = c.Close()
	}
}

// fork starts the first process, which waits for its list. Nothing can stop it before
// it has executed the program: it is nobody's but the supervisor's.
func (a *attempt) fork() (*process.Child, error) {
	var pidfd int
	attributes := &syscall.ProcAttr{Env: []string{}, Sys: &syscall.SysProcAttr{PidFD: &pidfd}}
	for _, file := range a.files {
		attributes.Files = append(attributes.Files, file.Fd())
	}
	first, err := a.launcher.parent.Start(func() (int, error) {
		return syscall.ForkExec(fmt.Sprintf("/proc/self/fd/%d", programFD), []string{name}, attributes)
	})
	if err != nil {
		return nil, fmt.Errorf("start the program launch: %w", err)
	}
	a.parents, a.parent = append(a.parents, os.NewFile(uintptr(pidfd), "pidfd")), first.PID
	return first, nil
}

// run sends the list and follows what becomes of it: until the process is at the exec
// barrier, or has executed its program.
func (a *attempt) run(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() { _ = a.ours.SetDeadline(time.Unix(1, 0)) })()
	_, err := a.WriteTo(a.ours)
	if err != nil {
		err = fmt.Errorf("send the list of calls to the program launch: %w", err)
	} else {
		err = a.files[socketFD].Close() // its end is to be seen
	}
	for done := false; err == nil && !done; {
		done, err = a.step()
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("not done in time, waiting for %s: %w", a.waiting, context.Cause(ctx))
	}
	return err
}

// end ends what the attempt has started but, without an error, the process that is launched,
// which it leaves to the supervisor. What cannot end yet ends when it can.
func (a *attempt) end(err error) {
	_ = a.ours.Close() // what waits to be told to go on, ends
	if made := a.made; err != nil && made != nil && made.Process != nil {
		_ = made.Process.Signal(unix.SIGKILL) // it may have ended
		_ = made.Process.Close()
	}
	for _, pidfd := range slices.Backward(a.parents) {
		_ = unix.PidfdSendSignal(int(pidfd.Fd()), unix.SIGKILL, nil, 0)
	}
	// They are in the container's cgroup, which nobody could remove before. In a frozen cgroup of
	// version 1 they end when that is thawed.
	for deadline := time.Now().Add(time.Second); slices.ContainsFunc(a.parents, lives) && time.Now().Before(deadline); {
		time.Sleep(50 * time.Microsecond)
	}
	for _, pidfd := range a.parents {
		_ = pidfd.Close()
	}
	a.closeAll()
}

func lives(pidfd *os.File) bool { return !process.HasEnded(int(pidfd.Fd())) }

// step waits for one thing that is said. The process has the socket, too, in reach of a
// container that traces it: over it nothing may be said but that it has failed.
func (a *attempt) step() (done bool, err error) {
	said := make([]byte, 8)
	_, err = io.ReadFull(a.ours, said)
	if errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET) {
		return true, a.closed()
	}
	if err != nil {
		return false, err
	}
	what, value := int(int32(binary.NativeEndian.Uint32(said))), int(int32(binary.NativeEndian.Uint32(said[4:])))
	switch {
	case what == helperMade && a.made == nil:
		a.waiting = "its helper in the cgroup of the container"
		return false, a.openHelper(value)
	case what == pidMade && a.made == nil:
		return false, a.own(value)
	}
	err = a.failure(what, syscall.Errno(value))
	if a.made != nil {
		err = fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition) // what it asks for is not there
	}
	return false, err
}

// openHelper opens the helper, whose pid is its own as long as its parent lives, and lets
// it go on.
func (a *attempt) openHelper(pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("the helper: %w", os.NewSyscallError("pidfd_open", err))
	}
	helper := os.NewFile(uintptr(fd), "pidfd")
	if err := a.isChild(pid); err != nil {
		return errors.Join(err, helper.Close())
	}
	a.parents, a.parent = append(a.parents, helper), pid
	return a.goOn()
}

// isChild is nil if a process is a child of the last parent, which does not reap it.
func (a *attempt) isChild(pid int) error {
	stat, err := process.ReadStat(pid)
	if !lives(a.parents[len(a.parents)-1]) { // the pid may be another's
		return errKilled
	}
	if err == nil && stat.Parent != a.parent {
		err = fmt.Errorf("process %d was named, which is none of this launch: %w", pid, errdefs.ErrFailedPrecondition)
	}
	return err
}

// own makes the process a child with an owner, and lets it go on.
func (a *attempt) own(pid int) error {
	child, err := a.launcher.parent.Start(func() (int, error) { return pid, a.isChild(pid) })
	if err != nil {
		return err
	}
	a.made = &Launched{Child: child}
	a.waiting = fmt.Sprintf("process %d to execute its program", pid)
	if a.made.Process, err = process.Find(pid); err != nil {
		return fmt.Errorf("the launched process: %w", err)
	}
	if child.HasExited() {
		return errKilled
	}
	return a.goOn()
}

// goOn lets the process that was forked last go on.
func (a *attempt) goOn() error {
	_, err := a.ours.Write([]byte{0})
	if errors.Is(err, syscall.EPIPE) {
		return a.closed()
	}
	return err
}

var errKilled = errors.New("it was killed before it executed its program")

// closed is what it means that nothing more is to be heard: the socket is closed at the exec
// barrier, by the execution of the program, or by the end of the process.
func (a *attempt) closed() error {
	if a.made == nil {
		return errKilled
	}
	stat, err := process.ReadStat(a.made.Child.PID)
	if err == nil && !a.made.Child.HasExited() && (stat.Executed || a.barrier && !stat.Exiting) {
		return nil
	}
	return fmt.Errorf("%w: %w", errKilled, errdefs.ErrFailedPrecondition)
}
