package supervisor

import (
	"errors"
	"flag"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"golang.org/x/sys/unix"
)

// A standby is the build that serves, started once more before another build
// takes its place: a process that has copies of all that is handed over and waits
// for the other build to say that it serves. If that ends instead, or says nothing
// within standbyLimit of its start, the standby ends it and serves in its place, by the same
// sockets and with the same terminals and inputs; containers have another parent
// then, as after a death.
type standby struct {
	pid   int
	serve int // the write end of the pipe over which the other build says so
}

// standbyLimit is how long a new build may take to serve. Tens of milliseconds
// are usual.
const standbyLimit = 10 * time.Second

// What a standby reads: executes is written by the build that serves when the other
// one takes its place, serves is what a supervisor writes to its Ready file.
const (
	executes = "executes\n"
	serves   = "ready\n"
)

// StandbyCommand is the argument of minicri-shim that makes it a standby.
const StandbyCommand = "standby"

// The descriptors of a standby; those that are handed over follow.
const (
	standbyHandover = 3 + iota
	standbyPipe
	standbyPredecessor
	standbyFirst
)

// startStandby starts this build once more; kept are the descriptors of h.
func (s *Supervisor) startStandby(h *handover, kept []int) (*standby, error) {
	outputs := s.outputs()
	defer closeDescriptors(outputs)
	other := h.renumbered(kept, standbyFirst)
	for i := range outputs {
		other.Outputs = append(other.Outputs, standbyFirst+len(kept)+i)
	}
	state, err := writeHandover(other)
	if err != nil {
		return nil, err
	}
	defer state.Close()
	self, err := unix.PidfdOpen(os.Getpid(), 0)
	if err != nil {
		return nil, os.NewSyscallError("pidfd_open", err)
	}
	defer unix.Close(self)
	var pipe [2]int
	if err := unix.Pipe2(pipe[:], unix.O_CLOEXEC); err != nil {
		return nil, os.NewSyscallError("pipe2", err)
	}
	defer unix.Close(pipe[0])
	arguments := append([]string{programName, StandbyCommand, "--"}, s.serveArguments(s.build, standbyHandover)...)
	files := []uintptr{0, 1, 2, state.Fd(), uintptr(pipe[0]), uintptr(self)}
	for _, fd := range slices.Concat(kept, outputs) {
		files = append(files, uintptr(fd))
	}
	pid, err := s.builtin.StartSelf(arguments, files)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("start this build once more, to stand by: %w", err), unix.Close(pipe[1]))
	}
	return &standby{pid: pid, serve: pipe[1]}, nil
}

// dismiss ends a standby: this process continues to serve. It is killed before the
// pipe is closed, which it would take for the end of this process.
func (s *Supervisor) dismiss(waits *standby) {
	s.builtin.End(waits.pid)
	_ = unix.Close(waits.serve)
}

// serveArguments are the command line of a supervisor that is handed the state in
// a descriptor.
func (s *Supervisor) serveArguments(build string, handover int) []string {
	arguments := []string{programName, "serve", "--dir", s.dir, "--build", build, "--handover-fd", strconv.Itoa(handover)}
	if s.systemd {
		arguments = append(arguments, "--systemd-cgroup")
	}
	return arguments
}

// Standby waits until the other build serves, and returns; or ends it and becomes
// a supervisor, by the command line behind its own flags.
func Standby(arguments []string) error {
	flags := flag.NewFlagSet(programName+" "+StandbyCommand, flag.ContinueOnError)
	if err := flags.Parse(arguments); err != nil {
		return err
	}
	if flags.NArg() < 2 {
		return errors.New("a standby needs the command line of a supervisor")
	}
	said, why := awaitServing(standbyPipe, standbyLimit)
	if said {
		return nil
	}
	fmt.Fprintf(os.Stderr, "level=ERROR msg=\"the new build does not serve; the one before does\" cause=%q\n", why)
	if err := endPredecessor(); err != nil {
		return err
	}
	_, _ = unix.Close(standbyPipe), unix.Close(standbyPredecessor)
	return fmt.Errorf("execute this program: %w", syscall.Exec("/proc/self/exe", flags.Args(), os.Environ()))
}

// awaitServing reports whether the other build has said that it serves, and why
// not. The limit begins when that is executed: what the build before does until then
// has limits of its own.
func awaitServing(pipe int, limit time.Duration) (said bool, why string) {
	var words []byte
	var deadline time.Time
	for {
		if !await(pipe, deadline) {
			return false, fmt.Sprintf("it says nothing within %v", limit)
		}
		part := make([]byte, len(executes)+len(serves))
		n, err := unix.Read(pipe, part)
		if err != nil || n == 0 {
			return false, "it has ended"
		}
		words = append(words, part[:n]...)
		if strings.HasSuffix(string(words), serves) {
			return true, ""
		}
		if deadline.IsZero() && strings.HasPrefix(string(words), executes) {
			deadline = time.Now().Add(limit)
		}
	}
}

// endPredecessor kills the other build, and waits until its process is gone.
func endPredecessor() error {
	err := unix.PidfdSendSignal(standbyPredecessor, unix.SIGKILL, nil, 0)
	if err != nil && !errors.Is(err, unix.ESRCH) {
		return os.NewSyscallError("pidfd_send_signal", err)
	}
	if !await(standbyPredecessor, time.Now().Add(standbyLimit)) {
		return fmt.Errorf("the new build still runs %v after SIGKILL", standbyLimit)
	}
	return nil
}

// await reports whether a descriptor can be read from, or has ended, before the
// deadline; zero is none.
func await(fd int, deadline time.Time) bool {
	for {
		milliseconds := -1
		if !deadline.IsZero() {
			milliseconds = int(max(0, time.Until(deadline)).Milliseconds())
		}
		poll := []unix.PollFd{{Fd: int32(fd), Events: unix.POLLIN}}
		n, err := unix.Poll(poll, milliseconds)
		if !errors.Is(err, unix.EINTR) {
			return n > 0
		}
	}
}
