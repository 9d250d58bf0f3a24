package runtime

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"sync/atomic"
	"syscall"

	"github.com/opencontainers/runtime-spec/specs-go"
)

// Exec is of Container.
func (c *builtinContainer) Exec(spec *specs.Process, streams Streams) (*Process, error) {
	process, err := newProcess(spec)
	if err != nil {
		return nil, err
	}
	t := c.newTree()
	if t != nil {
		process.SubCgroupPaths = map[string]string{t.controller: t.sub}
	}
	p, err := c.start(process, streams, t)
	if err != nil && t != nil {
		t.close()
	}
	return p, err
}

// tree is the cgroup of an exec, a child of its container's: what is in it can
// be ended, and nothing else.
type tree struct {
	container             *builtinContainer
	slot                  int
	controller, path, sub string
	killed                atomic.Bool
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
func (c *builtinContainer) newTree() *tree {
	controller, path, ok := tracker(c.cgroups)
	if !ok {
		return nil
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	for slot := range mostSlots {
		if c.slots[slot] {
			continue
		}
		t := &tree{container: c, slot: slot, controller: controller, sub: execCgroup + strconv.Itoa(slot)}
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
		c.slots[slot] = true
		return t
	}
	return nil
}

// note is the file that exists as long as somebody waits for the exec.
func (t *tree) note() string { return filepath.Join(t.container.dir, t.sub) }

func (t *tree) kill() error {
	t.killed.Store(true)
	return killCgroup(t.container.cgroups, t.sub, syscall.SIGKILL)
}

// close removes the cgroup, unless it holds a background process of an exec
// that has ended by itself.
func (t *tree) close() {
	_ = os.Remove(t.note())
	removeCgroup(t.path, t.killed.Load())
	t.container.mu.Lock()
	delete(t.container.slots, t.slot)
	t.container.mu.Unlock()
}

// EndExecs is of Container.
func (c *builtinContainer) EndExecs() error {
	_, path, ok := tracker(c.cgroups)
	notes, err := filepath.Glob(filepath.Join(c.dir, execCgroup+"*"))
	if err != nil || !ok {
		return err
	}
	// Before names were used again they ended with the supervisor's pid, and
	// there was no note.
	old, err := filepath.Glob(filepath.Join(path, execCgroup+"*-*"))
	for _, left := range append(notes, old...) {
		sub := filepath.Base(left)
		err = errors.Join(err, killCgroup(c.cgroups, sub, syscall.SIGKILL))
		removeCgroup(filepath.Join(path, sub), true)
		err = errors.Join(err, os.RemoveAll(filepath.Join(c.dir, sub)))
	}
	return err
}
