// Package api is the protocol between minicri and a supervisor, which is minicri-shim serve.
//
// Control is ttrpc on DIR/shim.sock (shim.proto). The streams of a container that a client attaches to are plain bytes
// on DIR/stream.sock, a connection per stream:
//
//	client     -> {"container":"ID","stream":"stdin"}\n
//	supervisor -> {}\n or {"error":"..."}\n
//	then bytes, to the supervisor for stdin, to the client for stdout and stderr
//
// An output stream begins with what the container writes from then on. It ends when the first process has ended and
// what it wrote is delivered. Half-closing a stdin stream closes the stdin of a container with stdin_once.
//
// An exec has one connection on DIR/exec.sock. A message is a byte, which carries descriptors, and JSON:
//
//	client     -> an ExecRequest with the process's ends of stdin, stdout and stderr; none for a terminal
//	supervisor -> an ExecAnswer, with the master of the terminal, when the program is executed or has failed
//	supervisor -> an ExecAnswer without the byte, when the process has ended
//	client     -> a byte, when it has read all output
//
// A client that closes the connection, or its sending half, before that byte ends the exec with all that it has
// started. The supervisor closes the connection when it has done so, or when it has given up.
package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// Ready is what a supervisor says to the process that starts it once it serves; else it says why not.
const Ready = "ready\n"

// Names of streams in a StreamRequest.
const (
	Stdin  = "stdin"
	Stdout = "stdout"
	Stderr = "stderr"
)

// StreamRequest opens a stream: the first line on a stream connection.
type StreamRequest struct {
	Container string `json:"container"`
	Exec      string `json:"exec,omitempty"` // of protocol 2
	Stream    string `json:"stream"`
}

// StreamResponse answers a StreamRequest.
type StreamResponse struct {
	Error string `json:"error,omitempty"`
}

// ExecRequest starts a process in a created or running container.
type ExecRequest struct {
	Container string         `json:"container"`
	Process   *specs.Process `json:"process"`
	// Apart puts the process into a cgroup below the container's, so that processes which it has detached end with it.
	Apart bool `json:"apart,omitempty"`
}

// ExecAnswer reports the start of a process; a second one reports its exit.
type ExecAnswer struct {
	ExitCode int32  `json:"exit_code,omitempty"` // 128 + signal if killed by one
	Error    string `json:"error,omitempty"`
	Kind     uint32 `json:"kind,omitempty"` // of the error, a code of gRPC
}

// ExitRecord is the content of ExitDir/ID.json. It is written before the event goes out, and outlives
// daemon and supervisor.
type ExitRecord struct {
	Code       int32  `json:"code"`       // 128 + signal if killed by one
	CodeKnown  bool   `json:"code_known"` // false if the exit status is lost
	OOMKilled  bool   `json:"oom_killed"`
	FinishedAt int64  `json:"finished_at"` // unix nanoseconds
	PID        int    `json:"pid"`
	StartError string `json:"start_error,omitempty"` // why the program was never executed; "" if it was
}

// PathGuard stands in the path of a log between the node owner's part and what others may write to, such as
// a log agent with /var/log/pods. To everybody else it means nothing (path_resolution(7)).
const PathGuard = "/./"

// GuardedPath is the path of name in base. A log that is opened by it is below base and behind no symbolic
// link there; base itself may have some.
func GuardedPath(base, name string) string {
	return filepath.Clean(base) + PathGuard + filepath.Clean(name)
}

// Files in a supervisor's directory, known to both sides.
const (
	ControlSocket = "shim.sock"
	StreamSocket  = "stream.sock"
	ExecSocket    = "exec.sock"
	LockFile      = "lock"       // see Lock
	AboutFile     = "about.json" // see About
	RecordDir     = "records"    // ID.json of each container and pause
	ExitDir       = "exits"      // ID.json per ended container, see ExitRecord
	StreamDir     = "io"         // output that is not logged yet, and the fifos of containers without a fifo_dir
)

const (
	// Protocol is the version of the protocol that this build speaks, with what starters and supervisors
	// say to each other: a supervisor of another build runs the daemon's starters (UseProgram).
	Protocol = 3
	// OldestProtocol is the oldest one that this build's daemon speaks: in 2 an exec has a connection for each stream.
	OldestProtocol = 2
	// RecordVersion is that of the files by which a successor adopts a supervisor's containers.
	RecordVersion = 1
)

// About is what a supervisor says of itself in AboutFile, also to those who do not know its protocol.
type About struct {
	Build    string `json:"build"`   // of the program, by its content
	Version  string `json:"version"` // of the daemon that started it
	Protocol uint32 `json:"protocol"`
	Records  uint32 `json:"records"`
}

// ReadAbout reads what the supervisor of a directory says of itself; nil if none has served there.
func ReadAbout(dir string) (*About, error) {
	content, err := os.ReadFile(filepath.Join(dir, AboutFile))
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	about := new(About)
	if err == nil {
		err = json.Unmarshal(content, about)
	}
	if err != nil {
		return nil, fmt.Errorf("read which build serves %s: %w", dir, err)
	}
	return about, nil
}

// Lock makes this process the one that serves a directory, until it ends or closes the file, which says its
// pid to people. The lock is a record lock (F_SETLK of fcntl(2)), which no child inherits. No other part of
// the process may open the file: the lock ends with the first descriptor that is closed.
func Lock(dir string) (*os.File, error) {
	lock, err := os.OpenFile(filepath.Join(dir, LockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	err = unix.FcntlFlock(lock.Fd(), unix.F_SETLK, &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart})
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		holder, holderErr := holderOf(lock)
		return nil, errors.Join(fmt.Errorf("lock %s: process %d serves it: another process has the lock", dir, holder), holderErr, lock.Close())
	}
	if err == nil {
		err = lock.Truncate(0)
	}
	if err == nil {
		_, err = lock.WriteString(strconv.Itoa(os.Getpid()) + "\n")
	}
	if err != nil {
		return nil, errors.Join(fmt.Errorf("lock %s: %w", dir, err), lock.Close())
	}
	return lock, nil
}

// LockHolder returns the pid of the process that has the lock of a directory, 0 if none has.
func LockHolder(dir string) (pid int, err error) {
	lock, err := os.Open(filepath.Join(dir, LockFile))
	if errors.Is(err, os.ErrNotExist) {
		return 0, nil
	}
	if err != nil {
		return 0, err
	}
	defer lock.Close()
	return holderOf(lock)
}

func holderOf(lock *os.File) (pid int, err error) {
	asked := &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
	if err := unix.FcntlFlock(lock.Fd(), unix.F_GETLK, asked); err != nil {
		return 0, fmt.Errorf("find the process that has locked %s: %w", lock.Name(), err)
	}
	if asked.Type == unix.F_UNLCK {
		return 0, nil
	}
	return int(asked.Pid), nil
}
