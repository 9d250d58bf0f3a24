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
	if c.exit != nil {
		return
	}
	c.askParent()
	init, child, known := c.findProcess()
	switch {
	case !known:
		go c.findAgain()
	case init != nil:
		c.found(init)
		c.unsettled = func() { c.follow(child) } // nothing else knows of c yet
	}
}

// settle does with a container that was adopted what can wait until the supervisor
// serves, and has to be done before anything else is done with the container: an exec
// that began before would be ended as one of the predecessor's.
func (c *container) settle() {
	c.settling.Lock()
	defer c.settling.Unlock()
	if c.unsettled != nil {
		c.unsettled()
		c.unsettled = nil
	}
}

// settleAll settles what no call has asked for. An upgrade waits for it.
func (s *Supervisor) settleAll() {
	s.changes.RLock()
	defer s.changes.RUnlock()
	for _, c := range s.all() {
		c.settle()
	}
}

// withoutState is the container for what is done with each that is adopted, or handed
// on. The state of one of libcontainer's is not read for it: with hundreds of them that
// would take longer than all else.
func (c *container) withoutState() (runtime.Adopted, error) {
	c.mu.Lock()
	loaded, record := c.runtime, c.record
	c.mu.Unlock()
	if loaded == nil && len(record.Runtime) == 0 {
		return c.sup.builtin.Adopted(record.ID, record.Cgroups), nil
	}
	return c.loaded()
}

// loaded is the container as its runtime has it, whose state is read now if it was
// not read before. errdefs.ErrNotFound says that there is none.
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
		init, child, known := c.findProcess()
		if init != nil {
			c.op.Lock()
			c.found(init)
			c.follow(child)
			c.op.Unlock()
		}
		c.sup.changes.RUnlock()
		if known {
			return
		}
	}
}

// findProcess finds out whether the container's process runs, and returns it; one that
// has ended is concluded, and nil. known is false if that cannot be told now.
func (c *container) findProcess() (init *runtime.Process, child, known bool) {
	record := c.snapshot()
	init, child, err := c.sup.builtin.Find(record.PID, record.StartTime)
	if err == nil {
		return init, child, true
	}
	if errors.Is(err, process.ErrGone) {
		exit, exitErr := c.readExit()
		if exitErr == nil { // it could not be read before
			go c.conclude(exit)
			return nil, false, true
		}
		var unreadable syscall.Errno
		if !errors.As(exitErr, &unreadable) || unreadable == syscall.ENOENT {
			c.mu.Lock()
			c.killed = true // perhaps, and that is enough not to blame lack of memory
			c.mu.Unlock()
			go c.awaitParent() // it has ended while no supervisor ran
			return nil, false, true
		}
		err = exitErr
	}
	c.sup.log.Error("whether a container runs cannot be known, it is tried again", "container", record.ID, "pid", record.PID, "error", err)
	return nil, false, false
}

// found continues with a container whose process runs.
func (c *container) found(init *runtime.Process) {
	c.mu.Lock()
	c.init = init
	c.mu.Unlock()
	c.checkStarted()
}

// follow continues what the predecessor did for a container that runs.
func (c *container) follow(child bool) {
	c.mu.Lock()
	c.oom.kills, _ = readOOMKills(c.record.Cgroups)
	c.mu.Unlock()
	adopted, err := c.withoutState()
	if err == nil {
		err = adopted.EndExecs()
		if !c.record.Bare {
			c.watchOOM(adopted)
		}
	}
	if err != nil && !errdefs.IsNotFound(err) {
		c.sup.log.Warn("execs of the shim that died may still run", "container", c.record.ID, "error", err)
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
