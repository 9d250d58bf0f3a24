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

// Files in a supervisor's directory, known to both sides.
const (
	ControlSocket = "shim.sock"
	StreamSocket  = "stream.sock"
	LockFile      = "lock"       // see Lock
	AboutFile     = "about.json" // see About
	RecordDir     = "records"    // ID.json of each container and pause
	ExitDir       = "exits"      // ID.json per ended container, see ExitRecord
	StreamDir     = "io"         // ID.stdout and ID.stderr, the fifos that containers write to
)

const (
	// Protocol is the version of the protocol that this build speaks. It covers the form of
	// starters too (starter.Request, starter.Answer and their framing): a supervisor of
	// another build runs those of the daemon's build (UseProgram).
	Protocol = 2
	// RecordVersion is that of the files in a supervisor's directory by which a
	// successor adopts its containers.
	RecordVersion = 1
)

// About is what a supervisor says of itself in its directory (AboutFile), also to those
// who do not know its protocol.
type About struct {
	Build    string `json:"build"`   // of the program, by its content
	Version  string `json:"version"` // of the daemon that started it
	Protocol uint32 `json:"protocol"`
	Records  uint32 `json:"records"`
}

// ReadAbout reads what the supervisor of a directory says of itself; nil if none has
// served there.
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

// ErrLocked says that another process has the lock of a directory.
var ErrLocked = errors.New("another process has the lock")

// Lock makes this process the one that serves a directory, until it ends or closes
// the file. It is a record lock (F_SETLK of fcntl(2)): a child has none, whatever
// descriptors it has. The file says the pid, for people who look. No other part of the
// process may open it: the lock ends with the first descriptor that is closed.
func Lock(dir string) (*os.File, error) {
	lock, err := os.OpenFile(filepath.Join(dir, LockFile), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, fmt.Errorf("lock %s: %w", dir, err)
	}
	err = unix.FcntlFlock(lock.Fd(), unix.F_SETLK, wholeFile())
	if errors.Is(err, unix.EAGAIN) || errors.Is(err, unix.EACCES) {
		holder, holderErr := holderOf(lock)
		return nil, errors.Join(fmt.Errorf("lock %s: process %d serves it: %w", dir, holder, ErrLocked), holderErr, lock.Close())
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

// LockHolder returns the pid of the process that has the lock of a directory, 0 if none
// has.
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
	asked := wholeFile()
	if err := unix.FcntlFlock(lock.Fd(), unix.F_GETLK, asked); err != nil {
		return 0, fmt.Errorf("find the process that has locked %s: %w", lock.Name(), err)
	}
	if asked.Type == unix.F_UNLCK {
		return 0, nil
	}
	return int(asked.Pid), nil
}

func wholeFile() *unix.Flock_t {
	return &unix.Flock_t{Type: unix.F_WRLCK, Whence: io.SeekStart}
}
