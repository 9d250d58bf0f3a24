// Package api is the protocol between minicri and a supervisor, which is minicri-shim serve.
//
// Control is ttrpc on DIR/shim.sock (shim.proto). Data is plain bytes on DIR/stream.sock, a connection per stream:
//
//	client     -> {"container":"ID","exec":"EXEC","stream":"stdin"}\n
//	supervisor -> {}\n or {"error":"..."}\n
//	then bytes, to the supervisor for stdin, to the client for stdout and stderr
//
// The supervisor ends an output stream when its process has ended and what it wrote is delivered, or, of an
// exec, all its writers have closed it. Half-closing a stdin stream closes the stdin of an exec, and of a
// container with stdin_once, but no terminal. An empty exec is the container itself: what it writes from then on.
package api

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"

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
	Exec      string `json:"exec,omitempty"`
	Stream    string `json:"stream"`
}

// StreamResponse answers a StreamRequest.
type StreamResponse struct {
	Error string `json:"error,omitempty"`
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
	LockFile      = "lock"       // see Lock
	AboutFile     = "about.json" // see About
	RecordDir     = "records"    // ID.json of each container and pause
	ExitDir       = "exits"      // ID.json per ended container, see ExitRecord
	StreamDir     = "io"         // output that is not logged yet, and the fifos of containers without a fifo_dir
)

const (
	// Protocol is the version of the protocol that this build speaks, with what starters and supervisors
	// say to each other: a supervisor of another build runs the daemon's starters (UseProgram).
	Protocol = 2
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
