package serve

import (
	"syscall"
	"time"

	"github.com/minicri/minicri/supervisor/api"
)

// awaitInit waits for a container's init and records its end.
func (c *container) awaitInit() {
	_ = c.init.Ended()
	ended := time.Now()
	status, known := c.init.Wait()
	c.finish(ended, status, known)
}

// finish records the end of init: what else runs in the container is ended, the
// exit is written and reported, however long the streams take.
func (c *container) finish(ended time.Time, status syscall.WaitStatus, known bool) {
	exit := &api.ExitRecord{
		Code: exitCode(status), CodeKnown: known, FinishedAt: ended.UnixNano(), PID: c.snapshot().PID,
		OOMKilled: known && c.killedByOOM(status),
	}
	if !known {
		exit.Code = unknownExitCode
	}
	c.endRest()
	if c.triedToStart() && known && status.Exited() {
		c.drain() // init has said there why it could not
		exit.StartError = c.startError()
	}
	if err := c.keepExit(exit); err != nil {
		c.sup.log.Error("the exit of a container is not on disk", "container", c.snapshot().ID, "error", err)
	}
	c.conclude(exit)
}

// conclude publishes an exit that is on disk.
func (c *container) conclude(exit *api.ExitRecord) {
	c.drain()
	c.mu.Lock()
	c.exit = exit
	c.mu.Unlock()
	close(c.exited)
	if c.snapshot().StartedAt != 0 && exit.StartError == "" {
		c.announceStart()
	}
	c.publish(api.EventKind_EVENT_EXITED)
}

func (c *container) keepExit(exit *api.ExitRecord) error {
	if c.record.Bare {
		return nil
	}
	return writeJSON(c.sup.exitPath(c.record.ID), exit)
}

// endRest kills what init leaves behind. With a pid namespace of the container's
// own nothing is left: the kernel ends all processes with the first one
// (pid_namespaces(7)). In one that it shares they would run on, with its ports
// and locks.
func (c *container) endRest() {
	time.AfterFunc(startGrace, c.abandon)
	if err := c.signalAll(syscall.SIGKILL); err != nil {
		c.sup.log.Warn("processes of a container that has ended may still run", "container", c.snapshot().ID, "error", err)
	}
}

// startGrace is how long the start of a container may take that has ended meanwhile: a
// hook that hangs would keep it from being deleted.
const startGrace = 5 * time.Second

// drainTimeout is how long the event of a container's end waits for its output to
// be in the log: people look there when they hear of it.
const drainTimeout = 500 * time.Millisecond

// drain ends the streams. A disk that hangs keeps them longer than that, in a
// goroutine that ends with the last write.
func (c *container) drain() {
	if c.follow == nil && c.streams() == nil {
		return
	}
	c.drained.Do(func() {
		done := make(chan struct{})
		go func() {
			defer close(done)
			if c.follow != nil {
				<-c.ioAdopted
			}
			c.streams().Drain()
		}()
		select {
		case <-done:
		case <-time.After(drainTimeout):
		}
	})
}

// unknownExitCode stands for an exit status that is lost, as in containerd.
const unknownExitCode = 255

// exitCode is the shell's: 128 + signal for a killed process.
func exitCode(status syscall.WaitStatus) int32 {
	if status.Signaled() {
		return 128 + int32(status.Signal())
	}
	return int32(status.ExitStatus())
}
