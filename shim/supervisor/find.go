package supervisor

import (
	"errors"
	"fmt"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/runtime"
)

// What a successor cannot read, because it has no descriptors or no memory left, or
// because a disk fails, says nothing of a container: it is taken for what its record
// says until it can be read.

// adoptProcess finds the container's process and waits for its end.
func (c *container) adoptProcess() {
	loaded, err := c.loaded()
	if err != nil && !errdefs.IsNotFound(err) {
		c.sup.log.Error("a container is adopted without its state: what needs that tries to read it again", "container", c.record.ID, "error", err)
	}
	if c.exit != nil {
		return
	}
	c.askParent(loaded)
	if !c.findProcess() {
		go c.findAgain()
	}
}

// loaded is the container as its runtime has it, whose state is read now if it could
// not be read before. errdefs.ErrNotFound says that there is none.
func (c *container) loaded() (runtime.Container, error) {
	c.loading.Lock()
	defer c.loading.Unlock()
	c.mu.Lock()
	loaded, record := c.runtime, c.record
	c.mu.Unlock()
	if loaded != nil {
		return loaded, nil
	}
	loaded, err := c.sup.runtimeOf(record).Load(record.ID)
	if errdefs.IsNotFound(err) {
		return nil, err
	}
	if err != nil {
		return nil, fmt.Errorf("read the state of container %s: %w: %w", record.ID, errdefs.ErrUnavailable, err)
	}
	c.mu.Lock()
	c.runtime = loaded
	c.mu.Unlock()
	return loaded, nil
}

const (
	findPause        = 100 * time.Millisecond
	longestFindPause = 5 * time.Second
)

// findAgain is findProcess until that succeeds, or the supervisor ends.
func (c *container) findAgain() {
	for pause := findPause; ; pause = min(2*pause, longestFindPause) {
		select {
		case <-c.sup.life.Done():
			return
		case <-time.After(pause):
		}
		c.sup.changes.RLock() // the next build looks for it, too
		found := c.findProcess()
		c.sup.changes.RUnlock()
		if found {
			return
		}
	}
}

// findProcess finds out whether the container's process runs, and has its end waited
// for; it reports false if that cannot be known now.
func (c *container) findProcess() bool {
	record := c.snapshot()
	init, child, err := c.sup.builtin.Find(record.PID, record.StartTime)
	if err == nil {
		c.follow(init, child)
		return true
	}
	if errors.Is(err, process.ErrGone) {
		exit, exitErr := c.readExit()
		if exitErr == nil { // it could not be read before
			go c.conclude(exit)
			return true
		}
		var unreadable syscall.Errno
		if !errors.As(exitErr, &unreadable) || unreadable == syscall.ENOENT {
			c.mu.Lock()
			c.killed = true // perhaps, and that is enough not to blame lack of memory
			c.mu.Unlock()
			go c.awaitParent() // it has ended while no supervisor ran
			return true
		}
		err = exitErr
	}
	c.sup.log.Error("whether a container runs cannot be known, it is tried again", "container", record.ID, "pid", record.PID, "error", err)
	return false
}

// follow continues what the predecessor did for a container that runs.
func (c *container) follow(init *runtime.Process, child bool) {
	c.op.Lock()
	defer c.op.Unlock()
	c.mu.Lock()
	c.init = init
	c.oom.kills, _ = readOOMKills(c.record.Cgroups)
	c.mu.Unlock()
	c.checkStarted()
	if loaded, err := c.loaded(); err == nil {
		if err := loaded.EndExecs(); err != nil {
			c.sup.log.Warn("execs of the shim that died may still run", "container", c.record.ID, "error", err)
		}
		if !c.record.Bare {
			c.watchOOM(loaded)
		}
	}
	if child {
		go c.awaitInit()
	} else {
		go c.awaitAdopted()
	}
}

// process is the container's init, nil if it has ended before this supervisor began,
// or is not found yet.
func (c *container) process() *runtime.Process {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.init
}

// readExit reads how the container has ended, as a predecessor has written it.
func (c *container) readExit() (*api.ExitRecord, error) {
	path, exit := c.sup.exitPath(c.record.ID), new(api.ExitRecord)
	err := readJSON(path, exit)
	if err == nil && exit.FinishedAt == 0 {
		err = fmt.Errorf("%s does not say when", path)
	}
	return exit, err
}
