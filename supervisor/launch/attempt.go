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
	"strconv"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
)

// The first process's descriptors after its streams; more follow.
const (
	socketFD  = 3 // gets the list, and answers
	lifeFD    = 4 // a pipe that is closed when the supervisor ends
	programFD = 5
)

// attempt is one launch: its list, and what was made for it.
type attempt struct {
	calls
	launcher *Launcher
	files    []*os.File // the descriptors of the first process, by their numbers
	toClose  []io.Closer

	ours    *net.UnixConn
	parents []*os.File // pidfds of the first process and of the helper
	parent  int        // the pid of the last of them
	made    *Launched  // the process; nil before its pid is known
	note    func(process.Facts) error
	ran     *bool  // it has executed its program; set when it has ended, before it is reaped
	barrier bool   // there is an exec barrier
	waiting string // for what, in errors
}

// newAttempt opens the descriptors that each first process gets. A nil stream is an empty one. The caller calls end.
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
	program, err := l.open()
	a.files = append(a.files, theirs, alive, program)
	return a, err
}

// give adds a descriptor to the first process, and returns its number.
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

// fork starts the first process. No container can stop it before it has executed the program.
func (a *attempt) fork() (*process.Child, error) {
	var pidfd int
	attributes := &syscall.ProcAttr{Env: []string{}, Sys: &syscall.SysProcAttr{PidFD: &pidfd}}
	for _, file := range a.files {
		attributes.Files = append(attributes.Files, file.Fd())
	}
	first, err := a.launcher.parent.Start(func() (int, error) {
		return syscall.ForkExec(fmt.Sprintf("/proc/self/fd/%d", programFD), []string{name}, attributes)
	}, nil)
	if err != nil {
		return nil, fmt.Errorf("start the program launch: %w", err)
	}
	a.parents, a.parent = append(a.parents, os.NewFile(uintptr(pidfd), "pidfd")), first.PID
	return first, nil
}

// run sends the list, and returns when the process is at the exec barrier or has executed its program. The end of the
// socket tells that: a pause closes it before the barrier, execve(2) that of an exec. See closed.
func (a *attempt) run(ctx context.Context) error {
	defer context.AfterFunc(ctx, func() { _ = a.ours.SetDeadline(time.Unix(1, 0)) })()
	_, err := a.WriteTo(a.ours)
	if err != nil {
		err = fmt.Errorf("send the list of calls to the program launch: %w", err)
	} else {
		err = a.files[socketFD].Close() // or reads would not end with the process
	}
	for done := false; err == nil && !done; {
		done, err = a.step(ctx)
	}
	if errors.Is(err, os.ErrDeadlineExceeded) {
		err = fmt.Errorf("not done in time, waiting for %s: %w", a.waiting, context.Cause(ctx))
	}
	return err
}

// end kills all processes of the attempt, after a success except the launched one. They end when they can.
func (a *attempt) end(err error) {
	_ = a.ours.Close() // ends a process that waits for goOn
	if made := a.made; err != nil && made != nil && made.Process != nil {
		if !made.Child.HasExited() {
			process.KillTree(made.Child.PID) // it may have executed its program, and that may have started others
		}
		_ = made.Process.Signal(unix.SIGKILL) // it may have ended
		_ = made.Process.Close()
	}
	limit, over := context.WithTimeout(context.Background(), process.KillLimit)
	defer over()
	a.endParents(limit.Done()) // until they end, the container's cgroup cannot be removed
	for _, pidfd := range a.parents {
		_ = pidfd.Close()
	}
	a.closeAll()
}

func lives(pidfd *os.File) bool { return !process.HasEnded(int(pidfd.Fd())) }

// step handles one message. Once the process is made, it may only say that it has failed: a container that
// traces it can write to the socket.
func (a *attempt) step(ctx context.Context) (done bool, err error) {
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
		return false, a.own(ctx, value)
	case what >= 0 && what < len(a.what):
		err = fmt.Errorf("%s: %w", a.what[what], syscall.Errno(value))
	case what == len(a.what):
		err = errors.New(a.missing)
	default:
		err = fmt.Errorf("read the list of calls: %w", syscall.Errno(value))
	}
	if a.made != nil {
		err = fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition) // the container lacks what the process asks for
	}
	return false, err
}

// openHelper opens the helper and lets it go on. The helper's pid is not reused while its parent lives.
func (a *attempt) openHelper(pid int) error {
	fd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return fmt.Errorf("open the helper: %w", os.NewSyscallError("pidfd_open", err))
	}
	helper := os.NewFile(uintptr(fd), "pidfd")
	if err := a.isChild(pid); err != nil {
		return errors.Join(err, helper.Close())
	}
	a.parents, a.parent = append(a.parents, helper), pid
	return a.goOn()
}

// isChild returns nil if the process is a child of the last parent. No parent reaps its child.
func (a *attempt) isChild(pid int) error {
	stat, err := process.ReadStat(pid)
	if !lives(a.parents[len(a.parents)-1]) { // the pid may be reused
		return errKilled
	}
	if err == nil && stat.Parent != a.parent {
		err = fmt.Errorf("process %d, which the program launch has named, is not its child: %w", pid, errdefs.ErrFailedPrecondition)
	}
	return err
}

// own makes the launched process a child that we own, ends its parents, and lets it go on. The program may ask for a
// signal when its parent ends (PR_SET_PDEATHSIG(2const)), so the process has its last parent before: it has become a
// child of the supervisor's first thread (find_new_reaper of kernel/exit.c), which lives as long as the supervisor.
func (a *attempt) own(ctx context.Context, pid int) error {
	// Start, not Own: its lock keeps the process from being reaped, and the pid from being reused, after isChild.
	ran := new(bool) // the attempt may be over when the process ends
	child, err := a.launcher.parent.Start(func() (int, error) { return pid, a.isChild(pid) }, func(pid int) {
		stat, err := process.ReadStat(pid)
		*ran = err == nil && stat.Executed
	})
	if err != nil {
		return err
	}
	a.made, a.ran = &Launched{Child: child}, ran
	if a.made.Process, err = process.Find(pid); err != nil {
		return fmt.Errorf("open the launched process: %w", err)
	}
	if child.HasExited() {
		return errKilled
	}
	if a.note != nil {
		if err := a.note(a.made.Process.Facts); err != nil {
			return err
		}
	}
	a.waiting = "the parents of process " + strconv.Itoa(pid) + " to end"
	if !a.endParents(ctx.Done()) {
		return os.ErrDeadlineExceeded // see run
	}
	a.waiting = fmt.Sprintf("process %d to execute its program", pid)
	return a.goOn()
}

// endParents kills the parents, and reports whether they have ended. In a frozen cgroup of version 1 they end at the thaw.
func (a *attempt) endParents(giveUp <-chan struct{}) bool {
	for _, pidfd := range slices.Backward(a.parents) {
		_ = unix.PidfdSendSignal(int(pidfd.Fd()), unix.SIGKILL, nil, 0) // it may have ended
	}
	const first, most = 50 * time.Microsecond, 10 * time.Millisecond // between two looks
	for pause := first; slices.ContainsFunc(a.parents, lives); pause = min(2*pause, most) {
		select {
		case <-giveUp:
			return false
		case <-time.After(pause):
		}
	}
	return true
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

// closed returns nil if the socket has ended because the process is at the exec barrier or has executed its program,
// and an error if the process was killed.
func (a *attempt) closed() error {
	if a.made == nil {
		return errKilled
	}
	stat, err := process.ReadStat(a.made.Child.PID)
	reaped := errors.Is(err, process.ErrGone) || err == nil && stat.StartTime != a.made.Process.StartTime
	if reaped {
		<-a.made.Child.Exited()
	}
	if reaped && *a.ran || !reaped && err == nil && (stat.Executed || a.barrier && !stat.Exiting) {
		return nil
	}
	return fmt.Errorf("%w: %w", errKilled, errdefs.ErrFailedPrecondition)
}

// base is where the program maps a list, far from itself and from the addresses that the kernel chooses.
const base = 0x10000000

// How a call is made (launch.c has the same).
const (
	keep      = 1 << iota // keeps its result
	firstKept             // takes the kept result as its first argument
	mayFail               // ignores errors
	mayMiss               // ignores that there is no such program
	forks                 // its child goes on with the list
	isLast                // and is the launched process

	skipShift = 8 // from this bit on: how many calls are skipped after a success
)

// Messages of the program, besides the number of a failed call (launch.c has the same).
const (
	noList     = -1 // the list cannot be read
	helperMade = -2 // the pid of a child that is not the last
	pidMade    = -3 // the pid of the launched process
)

// here is AT_FDCWD as an argument.
const here = ^uint64(100) + 1

// calls is a list of system calls, made in the order in which they were added.
type calls struct {
	data    []byte
	words   []uint64
	what    []string
	missing string // the error if the list ends, so no program was executed
}

// bytes puts bytes into the list, and returns the address that they will have, a multiple of 8.
func (c *calls) bytes(b []byte) uint64 {
	at := base + uint64(len(c.data))
	c.data = append(c.data, b...)
	for len(c.data)%8 != 0 {
		c.data = append(c.data, 0)
	}
	return at
}

// text puts a string with its NUL into the list.
func (c *calls) text(s string) uint64 { return c.bytes(append([]byte(s), 0)) }

// numbers puts 64-bit words into the list.
func (c *calls) numbers(words ...uint64) uint64 {
	b, _ := binary.Append(nil, binary.NativeEndian, words) // fixed size
	return c.bytes(b)
}

// texts puts strings and their addresses into the list, null-terminated as execve(2) takes them.
func (c *calls) texts(list []string) uint64 {
	var addresses []uint64
	for _, s := range list {
		addresses = append(addresses, c.text(s))
	}
	return c.numbers(append(addresses, 0)...)
}

// add adds a call; what describes it in errors.
func (c *calls) add(what string, number uintptr, args ...uint64) { c.put(what, 0, number, args...) }

// put adds a call with flags.
func (c *calls) put(what string, flags uint64, number uintptr, args ...uint64) {
	step := [8]uint64{0: uint64(number), 7: flags}
	copy(step[1:7], args)
	c.words = append(c.words, step[:]...)
	c.what = append(c.what, what)
}

// WriteTo writes the list for the program.
func (c *calls) WriteTo(w io.Writer) (int64, error) {
	const maxCalls, maxData = 4096, 4 << 20
	if len(c.what) > maxCalls || len(c.data) > maxData {
		return 0, fmt.Errorf("arguments and environment of %d bytes, %d system calls: %w", len(c.data), len(c.what), syscall.E2BIG)
	}
	head := []uint64{uint64(len(c.data) + 8*len(c.words)), uint64(len(c.data)), uint64(len(c.what))}
	list, _ := binary.Append(nil, binary.NativeEndian, head) // fixed size, as the words are
	list, _ = binary.Append(append(list, c.data...), binary.NativeEndian, c.words)
	n, err := w.Write(list)
	return int64(n), err
}
