package runtime

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"

	"github.com/containerd/errdefs"
)

// execCgroups are the cgroups of a container's execs: children of its own.
type execCgroups struct {
	cgroups map[string]string // the container's, by controller, "" for version 2
	dir     string            // has a note for each exec that is waited for

	mu    sync.Mutex   // guards what follows
	slots map[int]bool // those in use
	left  map[int]bool // those whose cgroup held a background process at the end
}

func newExecCgroups(cgroups map[string]string, dir string) *execCgroups {
	return &execCgroups{cgroups: cgroups, dir: dir, slots: make(map[int]bool), left: make(map[int]bool)}
}

// tree is the cgroup of an exec, a child of its container's: what is in it can
// be ended, and nothing else.
type tree struct {
	of                    *execCgroups
	slot                  int
	controller, path, sub string
	killed                atomic.Bool
	closed                atomic.Bool
}

// Names of the cgroups of execs. They are used again and again: what watches
// cgroups takes each new name for a new container.
const execCgroup = "minicri-exec-"

// mostSlots bounds the search for a name: no container has so many execs with
// something in the background.
const mostSlots = 1024

// newTree makes a child of the container's cgroup. Where that is refused, for
// example because the container has delegated its controllers, it is nil: the
// exec runs in the container's own, and only its first process can be ended.
func (e *execCgroups) newTree() *tree {
	controller, path, ok := tracker(e.cgroups)
	if !ok {
		return nil
	}
	e.mu.Lock()
	defer e.mu.Unlock()
	e.removeLeft(path)
	for slot := range mostSlots {
		if e.slots[slot] {
			continue
		}
		t := &tree{of: e, slot: slot, controller: controller, sub: execCgroup + strconv.Itoa(slot)}
		t.path = filepath.Join(path, t.sub)
		// One that is there holds what an earlier exec has left in the
		// background, or held it.
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

// removeLeft removes the cgroups whose background processes have ended since; mu
// is held.
func (e *execCgroups) removeLeft(path string) {
	for slot := range e.left {
		if e.slots[slot] {
			continue
		}
		err := os.Remove(filepath.Join(path, execCgroup+strconv.Itoa(slot)))
		if err == nil || errors.Is(err, os.ErrNotExist) {
			delete(e.left, slot)
		}
	}
}

// note is the file that exists as long as a client waits for the exec.
func (t *tree) note() string { return filepath.Join(t.of.dir, t.sub) }

// take puts a process that was started outside of the cgroup into it, and what it
// has started by then.
func (t *tree) take(pid int) {
	for moved := true; moved; {
		moved = false
		for _, each := range append(descendants(pid), pid) {
			if !t.has(each) {
				err := os.WriteFile(filepath.Join(t.path, "cgroup.procs"), []byte(strconv.Itoa(each)), 0)
				moved = moved || err == nil
			}
		}
	}
}

func (t *tree) has(pid int) bool {
	content, err := os.ReadFile(filepath.Join(t.path, "cgroup.procs"))
	return err == nil && slices.Contains(strings.Fields(string(content)), strconv.Itoa(pid))
}

func (t *tree) kill() error {
	t.killed.Store(true)
	return killCgroup(t.of.cgroups, t.sub, syscall.SIGKILL)
}

// close removes the cgroup, unless it holds a background process of an exec
// that has ended by itself. Called again it does nothing: the name may be that
// of another exec by then.
func (t *tree) close() {
	if t.closed.Swap(true) {
		return
	}
	_ = os.Remove(t.note())
	gone := removeCgroup(t.path, t.killed.Load())
	t.of.mu.Lock()
	defer t.of.mu.Unlock()
	delete(t.of.slots, t.slot)
	if !gone {
		t.of.left[t.slot] = true
	}
}

// endAll ends the execs that an earlier supervisor has left. errdefs.ErrUnavailable says
// that it cannot be read which those are.
func (e *execCgroups) endAll() error {
	_, path, ok := tracker(e.cgroups)
	if !ok {
		return nil
	}
	subs, err := namesIn(e.dir, execCgroup)
	if err != nil {
		return err
	}
	// Before names were used again they ended with the supervisor's pid, and
	// there was no note.
	old, err := filepath.Glob(filepath.Join(path, execCgroup+"*-*"))
	for _, left := range old {
		subs = append(subs, filepath.Base(left))
	}
	for _, sub := range subs {
		err = errors.Join(err, killCgroup(e.cgroups, sub, syscall.SIGKILL))
		removeCgroup(filepath.Join(path, sub), true)
		err = errors.Join(err, os.RemoveAll(filepath.Join(e.dir, sub)))
	}
	return err
}

// namesIn are the names in a directory of notes that begin with a prefix.
func namesIn(dir, prefix string) (names []string, err error) {
	entries, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("read which execs were left: %w: %w", errdefs.ErrUnavailable, err)
	}
	for _, entry := range entries {
		if strings.HasPrefix(entry.Name(), prefix) {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}
