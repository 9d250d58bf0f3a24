package serve

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/bundle"
	"github.com/minicri/minicri/supervisor/stdio"
)

// maxStartError bounds StartError, which List has of all containers, so that ttrpc can send the list. It also has to be
// UTF-8: a process that may trace init can write any bytes there, and ttrpc would fail the answers about all pods.
const maxStartError = 1 << 10

// finish kills what else runs in the container, and writes and reports the exit, however long streams take.
func (c *container) finish(ended time.Time, status syscall.WaitStatus, known bool) {
	exit := &api.ExitRecord{
		Code: exitCode(status, known), CodeKnown: known, FinishedAt: ended.UnixNano(), PID: c.snapshot().PID,
		OOMKilled: known && c.killedByOOM(status),
	}
	time.AfterFunc(abandonAfter, c.abandon) // or a start that hangs in a hook would hold up the deletion
	// In a shared pid namespace (pid_namespaces(7)) init's children outlive it.
	if err := c.record.Cgroups.Signal("", syscall.SIGKILL); err != nil {
		c.sup.log.Warn("processes of a container that has ended may still run", "container", c.record.ID, "error", err)
	}
	c.mu.Lock()
	triedToStart := c.neverRan && c.record.StartedAt != 0
	c.mu.Unlock()
	if triedToStart && known && status.Exited() {
		c.drain() // init has said there why it could not
		said := bytes.TrimSpace(c.ignoreInit())
		said = bytes.ToValidUTF8(said[max(0, len(said)-maxStartError):], nil)
		exit.StartError = cmp.Or(string(said), "init ended and did not execute the program")
	}
	if !c.record.Bare {
		if err := bundle.WriteJSON(c.sup.exitPath(c.record.ID), exit); err != nil {
			c.sup.log.Error("the exit of a container is not on disk", "container", c.record.ID, "error", err)
		}
	}
	c.conclude(exit)
	c.snapshot().RemoveEmptied()
}

// conclude reports an exit that is on disk.
func (c *container) conclude(exit *api.ExitRecord) {
	c.drain()
	c.mu.Lock()
	c.exit = exit
	c.mu.Unlock()
	close(c.exited)
	c.publish()
}

// drain ends the streams. It waits up to drainLimit for the output to be in the log, where people look when
// they hear of the end. If the disk hangs, the goroutine ends with the last write. The fifos stay until the
// log has all: a successor, and the daemon, which holds them, see by them that something is missing.
func (c *container) drain() {
	c.drained.Do(func() {
		done := make(chan struct{})
		go func() {
			defer close(done)
			c.streams().Drain()
			_ = c.streamOptions().RemoveFifos() // removeFiles tries again
		}()
		select {
		case <-done:
		case <-time.After(drainLimit):
		}
	})
}

// exitCode returns the shell's code: 128 + signal for a killed process. 255 is for a lost status, as in containerd.
func exitCode(status syscall.WaitStatus, known bool) int32 {
	switch {
	case !known:
		return 255
	case status.Signaled():
		return 128 + int32(status.Signal())
	}
	return int32(status.ExitStatus())
}

// kill signals init, or every process of the container. If that has stopped, the error is ErrNotFound.
func (c *container) kill(sig syscall.Signal, all bool) error {
	c.mu.Lock()
	stopped := c.exit != nil
	c.killed = c.killed || sig == syscall.SIGKILL
	c.mu.Unlock()
	if stopped {
		return fmt.Errorf("kill container %s: it has ended: %w", c.record.ID, errdefs.ErrNotFound)
	}
	var err error
	if all && sig == syscall.SIGKILL {
		c.abandon() // ends a start or an exec under way
	}
	if all {
		err = c.record.Cgroups.Signal("", sig)
	}
	// A privileged init may have moved to a cgroup outside.
	if !all || sig == syscall.SIGKILL {
		switch killErr := c.init.signal(sig); {
		case errors.Is(killErr, os.ErrPermission): // its AppArmor profile refuses, which cgroup.kill does not ask
			if !all {
				err = fmt.Errorf("%w: %w", errdefs.ErrPermissionDenied, killErr)
			}
		case !errors.Is(killErr, os.ErrProcessDone):
			err = errors.Join(err, killErr)
		}
	}
	if err != nil {
		return fmt.Errorf("kill container %s: %w", c.record.ID, err)
	}
	return nil
}

func (c *container) end() error {
	if err := c.kill(syscall.SIGKILL, true); err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	select {
	case <-c.exited:
		return nil
	case <-time.After(process.KillLimit):
		return fmt.Errorf("end container %s: it still runs %v after SIGKILL: %w", c.record.ID, process.KillLimit, errdefs.ErrUnavailable)
	}
}

// delete removes a stopped container. It can be repeated.
func (c *container) delete(ctx context.Context) error {
	waiting, over := context.WithTimeoutCause(ctx, process.KillLimit, fmt.Errorf("another operation on it is not done within %v: %w", process.KillLimit, errdefs.ErrUnavailable))
	defer over()
	if c.op.Acquire(waiting, 1) != nil { // a hook that hangs may hold it
		return fmt.Errorf("delete container %s: %w", c.record.ID, context.Cause(waiting))
	}
	defer c.op.Release(1)
	if c.init.gone() {
		select {
		case <-c.exited: // it is about to be concluded
		case <-waiting.Done():
		}
	}
	if !isClosed(c.exited) {
		return fmt.Errorf("delete container %s: it has not ended: %w", c.record.ID, errdefs.ErrFailedPrecondition)
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), operationLimit)
	defer cancel()
	if err := c.remove(ctx); err != nil {
		return fmt.Errorf("delete container %s: %w: %w", c.record.ID, errdefs.ErrUnavailable, err)
	}
	if err := c.sup.removeFiles(c.streamOptions()); err != nil {
		return fmt.Errorf("delete container %s: %w", c.record.ID, err)
	}
	_ = c.init.close()
	c.sup.forget(c.record.ID)
	return nil
}

// removeFiles removes the supervisor's files of a container, the record last.
func (s *Supervisor) removeFiles(streams stdio.Options) error {
	return errors.Join(
		streams.RemoveFifos(), os.RemoveAll(s.exitPath(streams.ID)), os.RemoveAll(s.recordPath(streams.ID)))
}

// removeUnknown removes what is left of a container that is not served: its record cannot be read, or its creation
// could not be undone. The daemon removes its cgroups.
func (s *Supervisor) removeUnknown(id string) error {
	var errs []error
	for _, pattern := range []string{statesDir, filepath.Join(runtimesDir, "*")} {
		found, _ := filepath.Glob(filepath.Join(s.dir, pattern, id)) // a good pattern
		for _, path := range found {
			errs = append(errs, os.RemoveAll(path))
		}
	}
	return errors.Join(append(errs, s.removeFiles(stdio.Options{Dir: filepath.Join(s.dir, api.StreamDir), ID: id}))...)
}

func (c *container) countOOMBefore() {
	c.countOOM()
	before := c.sup.unclaimedOOMKills(c.oomParent())
	c.mu.Lock()
	c.oomBefore = before
	c.mu.Unlock()
}

// countOOM reads the kernel's counter. gone means that systemd has removed the empty cgroup.
func (c *container) countOOM() (gone bool) {
	kills, gone := readOOMKills(c.snapshot().Cgroups)
	c.mu.Lock()
	more := max(0, kills-c.oomKills)
	c.oomKills += more
	c.mu.Unlock()
	c.sup.claimOOMKills(c.oomParent(), more)
	return gone
}

// oomParent is the cgroup that knows a container's OOM kills when systemd has removed the container's own:
// version 2 counts events in all ancestors. It is "" on version 1, where nobody removes it before us.
func (c *container) oomParent() string {
	cgroups := c.snapshot().Cgroups
	if _, v1 := cgroups["memory"]; v1 || cgroups[""] == "" {
		return ""
	}
	parent := filepath.Dir(cgroups[""])
	if filepath.Ext(parent) == ".scope" { // crun makes a cgroup in its scope
		parent = filepath.Dir(parent)
	}
	return parent
}

// claimOOMKills notes that kills which a cgroup has counted are those of one container below it.
func (s *Supervisor) claimOOMKills(parent string, kills int) {
	if kills > 0 {
		s.mu.Lock()
		s.oomClaims[parent] += kills
		s.mu.Unlock()
	}
}

// unclaimedOOMKills are kills that a cgroup has counted and no container claimed: older ones, or of others.
// When it has counted more, containers that go on claim theirs first.
func (s *Supervisor) unclaimedOOMKills(parent string) int {
	kills, _ := readOOMKills(bundle.Cgroups{"": parent})
	s.mu.Lock()
	defer s.mu.Unlock()
	if seen := kills; seen != s.oomSeen[parent] {
		s.mu.Unlock()
		for _, c := range s.all() {
			if c.oomParent() == parent {
				c.countOOM()
			}
		}
		kills, _ = readOOMKills(bundle.Cgroups{"": parent}) // what they claim is in it
		s.mu.Lock()
		s.oomSeen[parent] = seen
	}
	return kills - s.oomClaims[parent]
}

// killedByOOM reports whether lack of memory has ended the container: SIGKILL ended it, or a child whose
// code it passed on, as shells do; we did not send it; and the kernel has killed a process of it. A
// container without a cgroup takes an unclaimed kill of its parent.
func (c *container) killedByOOM(status syscall.WaitStatus) bool {
	sigkill := status.Signaled() && status.Signal() == syscall.SIGKILL
	if c.record.Bare || !sigkill && !(status.Exited() && status.ExitStatus() == 128+int(syscall.SIGKILL)) {
		return false
	}
	parent := c.oomParent()
	unclaimed := c.countOOM() && c.sup.unclaimedOOMKills(parent) > c.oomBefore
	if unclaimed {
		c.sup.claimOOMKills(parent, 1)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.killed && (c.oomKills > 0 || unclaimed)
}

// readOOMKills reads memory.events (v2) or memory.oom_control (v1, Linux 4.13). gone means that the v2 cgroup is.
func readOOMKills(cgroups bundle.Cgroups) (kills int, gone bool) {
	path := filepath.Join(cgroups[""], "memory.events")
	v1, hasV1 := cgroups["memory"]
	if hasV1 {
		path = filepath.Join(v1, "memory.oom_control")
	}
	content, err := os.ReadFile(path)
	if err != nil { // no cgroup, or no memory controller: no kills
		_, err := os.Stat(cgroups[""])
		return 0, !hasV1 && cgroups[""] != "" && errors.Is(err, fs.ErrNotExist)
	}
	for line := range strings.Lines(string(content)) {
		if count, ok := strings.CutPrefix(line, "oom_kill "); ok {
			kills, _ = strconv.Atoi(strings.TrimSpace(count))
		}
	}
	return kills, false
}
