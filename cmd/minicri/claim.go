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

var errInUse = errors.New("in use by another daemon")

// claim takes the socket and the directories for this daemon. unlock releases the directories.
func claim(ctx context.Context, c *config.Config) (unlock func(), err error) {
	// A process that a killed daemon was just starting holds its socket and locks until execve(2).
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

// lockDirectories keeps a second daemon away (flock(2)), and removes what an earlier one had not finished.
func lockDirectories(c *config.Config) (unlock func(), err error) {
	var locks []*os.File
	unlock = func() {
		for _, lock := range locks {
			_ = lock.Close()
		}
	}
	for _, directory := range []string{c.Root, c.State} {
		lock, err := lockDirectory(directory)
		if err == nil {
			locks = append(locks, lock)
			err = state.ClearTemporary(directory)
		}
		if err != nil {
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

// removeStale removes nothing but a socket that no process listens on.
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
