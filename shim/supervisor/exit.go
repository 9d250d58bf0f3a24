package supervisor

import (
	"path/filepath"
	"syscall"
	"time"

	"github.com/minicri/minicri/shim/api"
)

// awaitInit waits for a container's init and records its end.
func (c *container) awaitInit() {
	_ = c.init.Ended()
	if !c.adopted {
		c.noteProgram()
	}
	c.finish(c.init.Wait())
}

// finish records the end of init: streams to their end, facts to the disk, then
// the event.
func (c *container) finish(status syscall.WaitStatus, known bool) {
	exit := &api.ExitRecord{
		Code: exitCode(status), CodeKnown: known, FinishedAt: time.Now().UnixNano(), PID: c.snapshot().PID,
		OOMKilled: known && status.Signaled() && status.Signal() == syscall.SIGKILL && c.killedByOOM(),
	}
	if !known {
		exit.Code = unknownExitCode
	}
	if c.io != nil {
		c.io.Drain()
	}
	if known && status.Exited() {
		exit.StartError = c.startError()
	}
	path := filepath.Join(c.sup.dir, api.ExitDir, c.snapshot().ID+".json")
	if err := writeJSON(path, exit); err != nil {
		c.sup.log.Error("the exit of a container is not on disk", "container", c.snapshot().ID, "error", err)
	}
	c.mu.Lock()
	c.exit = exit
	c.mu.Unlock()
	close(c.exited)
	if c.snapshot().StartedAt != 0 && exit.StartError == "" {
		c.announceStart()
	}
	c.sup.events.publish(api.EventKind_EVENT_EXITED, c.state())
}

// unknownExitCode stands for an exit that nobody saw, as in containerd.
const unknownExitCode = 255

// exitCode is the shell's: 128 + signal for a killed process.
func exitCode(status syscall.WaitStatus) int32 {
	if status.Signaled() {
		return 128 + int32(status.Signal())
	}
	return int32(status.ExitStatus())
}
