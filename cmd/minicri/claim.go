package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/internal/state"
)

// errInUse is the error of a socket or directory that another daemon uses.
var errInUse = errors.New("in use by another daemon")

// handover is how long a daemon that was killed may seem to be there: a process
// that it was just starting holds its socket and its locks up to the execve(2).
const handover = 2 * time.Second

// claim takes the socket and the directories for this daemon, and returns what
// releases the directories.
func claim(ctx context.Context, c *config.Config) (unlock func(), err error) {
	ctx, cancel := context.WithTimeout(ctx, handover)
	defer cancel()
	for {
		if err = removeStale(c.Socket); err == nil {
			unlock, err = lockDirectories(c)
		}
		if !errors.Is(err, errInUse) {
			return unlock, err
		}
		select {
		case <-ctx.Done():
			return nil, err
		case <-time.After(5 * time.Millisecond):
		}
	}
}

// lockDirectories keeps a second daemon away from the directories of this one;
// the kernel releases the locks with the process (flock(2)). What an earlier daemon
// was writing there when it was killed is removed.
func lockDirectories(c *config.Config) (unlock func(), err error) {
	var locks []*os.File
	unlock = func() {
		for _, lock := range locks {
			_ = lock.Close()
		}
	}
	for _, directory := range []string{c.Root, c.State} {
		lock, err := lockDirectory(directory)
		if err != nil {
			unlock()
			return nil, err
		}
		locks = append(locks, lock)
		if err := state.ClearTemporary(directory); err != nil {
			unlock()
			return nil, err
		}
	}
	return unlock, nil
}

func lockDirectory(directory string) (*os.File, error) {
	// Searchable by all: processes of user namespaces reach what is below.
	if err := os.MkdirAll(directory, 0o711); err != nil {
		return nil, err
	}
	lock, err := os.OpenFile(filepath.Join(directory, "lock"), os.O_CREATE|os.O_RDWR, 0o600)
	if err != nil {
		return nil, err
	}
	err = unix.Flock(int(lock.Fd()), unix.LOCK_EX|unix.LOCK_NB)
	if errors.Is(err, unix.EWOULDBLOCK) {
		err = fmt.Errorf("%s is %w: stop that one, or give this one --root and --state of its own", directory, errInUse)
	}
	if err != nil {
		return nil, errors.Join(err, lock.Close())
	}
	return lock, nil
}

// removeStale removes a socket that no process listens on, and nothing else.
func removeStale(path string) error {
	err := socket.CheckFree(path)
	switch {
	case errors.Is(err, socket.ErrInUse):
		return fmt.Errorf("%s is %w: stop that one, or give another --socket", path, errInUse)
	case errors.Is(err, socket.ErrNotSocket):
		return fmt.Errorf("%w: remove it, or give another --socket", err)
	case err != nil:
		return err
	}
	if err := os.Remove(path); !errors.Is(err, os.ErrNotExist) {
		return err
	}
	return nil
}
