package serve

import (
	"errors"
	"fmt"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/runtime"
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
	init, known := c.findProcess()
	c.execsEnded = known && init == nil // with the rest of the container: finish
	switch {
	case !known:
		go c.findAgain()
	case init != nil:
		c.found(init)
		c.follow = sync.OnceFunc(c.watch)
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

// settleAll does what can wait until the supervisor serves: first no end goes unseen.
func (s *Supervisor) settleAll() {
	all := s.all()
	several(mostSettled, len(all), func(i int) { all[i].watchAdopted() })
	several(mostSettled, len(all), func(i int) { _ = all[i].endLeftExecs() })
	several(mostSettled, len(s.cutOff), func(i int) { s.cutOff[i].removeCutOff() })
}

// removeCutOff removes a container whose creation was cut off, with what it had started.
func (c *container) removeCutOff() {
	err := c.runtime.Delete(c.sup.life)
	if err == nil {
		err = c.removeFiles()
	}
	c.sup.log.Warn("removed what was left of a container that was never made", "container", c.record.ID, "error", err)
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
	err := c.runtime.EndExecs()
	if err != nil && !errdefs.IsNotFound(err) && !c.hasEnded() {
		c.sup.log.Warn("execs that no client waits for may still run", "container", c.snapshot().ID, "error", err)
	}
	return err
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
		init, known := c.findProcess()
		if init != nil {
			c.op.Lock()
			c.found(init)
			c.watch()
			c.op.Unlock()
		}
		if known {
			_ = c.endLeftExecs() // if they can be read now, too
			return
		}
	}
}

// findProcess finds out whether the container's process runs, and returns it; one that
// has ended is concluded, and nil. known is false if that cannot be told now.
func (c *container) findProcess() (init *runtime.Process, known bool) {
	record := c.snapshot()
	init, err := runtime.Find(record.PID, record.StartTime)
	if err == nil {
		return init, true
	}
	if errors.Is(err, process.ErrGone) {
		exit, exitErr := c.readExit()
		if exitErr == nil { // it could not be read before
			go c.conclude(exit)
			return nil, true
		}
		var unreadable syscall.Errno
		if !errors.As(exitErr, &unreadable) || unreadable == syscall.ENOENT {
			c.mu.Lock()
			c.killed = true // perhaps, and that is enough not to blame lack of memory
			c.mu.Unlock()
			go c.awaitParent() // it has ended while no supervisor ran
			return nil, true
		}
		err = exitErr
	}
	c.sup.log.Error("whether a container runs cannot be known, it is tried again", "container", record.ID, "pid", record.PID, "error", err)
	return nil, false
}

// found continues with a container whose process runs.
func (c *container) found(init *runtime.Process) {
	c.mu.Lock()
	c.init = init
	c.mu.Unlock()
	c.checkStarted()
}

// watch has the lack of memory and the end of a container seen that runs.
func (c *container) watch() {
	c.mu.Lock()
	c.oom.kills, _ = readOOMKills(c.record.Cgroups)
	c.mu.Unlock()
	if !c.record.Bare {
		c.watchOOM()
	}
	go c.awaitAdopted()
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
