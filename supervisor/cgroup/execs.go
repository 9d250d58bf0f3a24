package cgroup

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"

	"github.com/containerd/errdefs"
)

// Execs are the cgroups of a container's execs: children of its own.
type Execs struct {
	cgroups Paths  // the container's
	dir     string // has a note for each exec that is waited for

	mu    sync.Mutex
	slots map[int]bool // those in use
}

// NewExecs returns those of a container. dir has a note for each exec that is waited
// for, so that a successor of the supervisor knows which to end.
func NewExecs(of Paths, dir string) *Execs {
	return &Execs{cgroups: of, dir: dir, slots: make(map[int]bool)}
}

// Exec is the cgroup of an exec, a child of its container's: what is in it can
// be ended, and nothing else. Sub is its name, below that of Controller, "" for
// version 2.
type Exec struct {
	Controller, Sub string

	of   *Execs
	slot int
	path string

	mu             sync.Mutex // so that what is closed is not killed: the name may be another's
	killed, closed bool
}

// Names of the cgroups of execs. They are used again and again: what watches
// cgroups takes each new name for a new container.
const execCgroup = "minicri-exec-"

// mostSlots bounds the search for a name: no container has so many execs with
// something in the background.
const mostSlots = 1024

// New makes a child of the container's cgroup. Where that is refused, for
// example because the container has delegated its controllers, it is nil: the
// exec runs in the container's own, and only its first process can be ended.
func (e *Execs) New() *Exec {
	controller, path, ok := e.cgroups.tracker()
	if !ok {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	for slot := range mostSlots {
		if e.slots[slot] {
			continue
		}
		t := &Exec{of: e, slot: slot, Controller: controller, Sub: execCgroup + strconv.Itoa(slot)}
		t.path = filepath.Join(path, t.Sub)
		// One that is there held what an earlier exec has left in the background, or
		// holds it: then its name is passed by.
		_ = os.Remove(t.path)
		err := os.Mkdir(t.path, 0o755)
		if errors.Is(err, os.ErrExist) {
			continue
		}
		if err == nil {
			err = os.WriteFile(t.note(), nil, 0o600)
		}
		if err != nil {
			_ = os.Remove(t.path)
			return nil
		}
		e.slots[slot] = true
		return t
	}
	return nil
}

// note is the file that exists as long as a client waits for the exec.
func (t *Exec) note() string { return filepath.Join(t.of.dir, t.Sub) }

// Paths are the container's cgroups with that of the exec in its place.
func (t *Exec) Paths() Paths {
	paths := maps.Clone(t.of.cgroups)
	paths[t.Controller] = t.path
	return paths
}

// Kill ends all that is in it. Once it is closed that is nothing.
func (t *Exec) Kill() error {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return nil
	}
	t.killed = true
	return t.of.cgroups.signal(t.Sub, syscall.SIGKILL)
}

// Close removes the cgroup, unless it holds a background process of an exec
// that has ended by itself. Called again it does nothing.
func (t *Exec) Close() {
	t.mu.Lock()
	defer t.mu.Unlock()
	if t.closed {
		return
	}
	t.closed = true
	_ = os.Remove(t.note())
	removeOne(t.path, t.killed)
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	delete(t.of.slots, t.slot)
}

// EndAll ends the execs that an earlier supervisor has left. errdefs.ErrUnavailable says
// that it cannot be read which those are.
func (e *Execs) EndAll() error {
	_, path, ok := e.cgroups.tracker()
	if !ok {
		return nil
	}
	notes, err := os.ReadDir(e.dir)
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return fmt.Errorf("read which execs were left: %w: %w", errdefs.ErrUnavailable, err)
	}
	for _, note := range notes {
		sub := note.Name()
		if !strings.HasPrefix(sub, execCgroup) {
			continue
		}
		err = errors.Join(err, e.cgroups.signal(sub, syscall.SIGKILL))
		removeOne(filepath.Join(path, sub), true)
		err = errors.Join(err, os.RemoveAll(filepath.Join(e.dir, sub)))
	}
	return err
}
