package supervisor

import (
	"errors"
	"fmt"
	"sync"
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

// adoptProcess finds the container's process; its end is waited for once the supervisor
// serves (watchAdopted).
func (c *container) adoptProcess() {
	if c.exit != nil {
		c.execsEnded = true
		return
	}
	c.askParent()
	init, child, known := c.findProcess()
	c.execsEnded = known && init == nil // with the rest of the container: finish
	switch {
	case !known:
		go c.findAgain()
	case init != nil:
		c.found(init)
		c.follow = sync.OnceFunc(func() { c.watch(child) })
	}
}

// watchAdopted continues what the predecessor did for a container that was adopted, as
// soon as the supervisor serves, or before a call that is for the container.
func (c *container) watchAdopted() {
	if c.follow != nil {
		c.follow()
	}
}

// mostSettled is of how many containers at a time the execs are ended: each may be waited
// for, so there are more than processors.
const mostSettled = 32

// settleAll does what can wait until the supervisor serves: first no end goes unseen. An
// upgrade waits for that, not for the execs that are left: the next build ends them, too.
func (s *Supervisor) settleAll() {
	all := s.all()
	s.changes.RLock()
	several(mostSettled, len(all), func(i int) { all[i].watchAdopted() })
	s.changes.RUnlock()
	several(mostSettled, len(all), func(i int) { _ = all[i].endLeftExecs() })
}

// endLeftExecs ends the execs whose streams nobody has any more, before the first one of
// ours is started, which would be taken for one of them. It may take seconds. An error
// says that they cannot be known now, and are to be ended later.
func (c *container) endLeftExecs() error {
	c.ending.Lock()
	defer c.ending.Unlock()
	if c.execsEnded {
		return nil
	}
	err := c.endExecs()
	if errdefs.IsUnavailable(err) {
		return fmt.Errorf("end the execs of container %s that an earlier supervisor has left: %w", c.snapshot().ID, err)
	}
	c.execsEnded = true
	return nil
}

// endExecs ends all execs of a container.
func (c *container) endExecs() error {
	adopted, err := c.withoutState()
	if err == nil {
		err = adopted.EndExecs()
	}
	if err != nil && !errdefs.IsNotFound(err) && !c.hasEnded() {
		c.sup.log.Warn("execs that no client waits for may still run", "container", c.snapshot().ID, "error", err)
	}
	return err
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
			c.watch(child)
			c.op.Unlock()
		}
		c.sup.changes.RUnlock()
		if known {
			_ = c.endLeftExecs() // if they can be read now, too
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

// watch has the lack of memory and the end of a container seen that runs.
func (c *container) watch(child bool) {
	c.mu.Lock()
	c.oom.kills, _ = readOOMKills(c.record.Cgroups)
	c.mu.Unlock()
	if !c.record.Bare {
		adopted, err := c.withoutState()
		switch {
		case err == nil:
			c.watchOOM(adopted)
		case !errdefs.IsNotFound(err):
			c.sup.log.Warn("OOM kills are seen only at the exit", "container", c.record.ID, "error", err)
		}
	}
	if child {
		go c.awaitInit()
	} else {
		go c.awaitAdopted()
	}
}

func (c *container) hasEnded() bool {
	select {
	case <-c.exited:
		return true
	default:
		return false
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
