package serve

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/minicri/minicri/supervisor/api"
)

const (
	// oomDelay is how long after its notice a kill may come.
	oomDelay = 500 * time.Millisecond

	// oomWindow is how far before the end of init an OOM kill may lie to be the
	// kill of init itself: what is killed has to run once more to end, and on a
	// busy machine it waits for a processor, as the supervisor does to see it.
	oomWindow = 2 * time.Second

	// oomChildWindow is the same for the kill of a child, for an init that ends
	// with the child's code: it may have some cleaning up to do.
	oomChildWindow = 10 * time.Second

	// oomExitStatus is how a shell, and with it most entry points, passes on that
	// its child was killed by SIGKILL.
	oomExitStatus = 128 + int(syscall.SIGKILL)
)

// oomCount is how many processes of a container the kernel has killed.
type oomCount struct {
	kills  int
	last   time.Time // when kills was seen to grow
	before int       // Supervisor.unclaimedOOMKills when the container was made
}

// watchOOM follows the kernel's notices until the cgroup is gone.
func (c *container) watchOOM() {
	c.oom.before = c.sup.unclaimedOOMKills(c.oomParent())
	notices, err := c.snapshot().Cgroups.NotifyOOM()
	if err != nil {
		c.sup.log.Warn("OOM kills are seen only at the exit", "container", c.snapshot().ID, "error", err)
		close(c.oomWatched)
		return
	}
	go func() {
		defer close(c.oomWatched)
		for range notices {
			if c.awaitOOM() {
				c.publish(api.EventKind_EVENT_OOM)
			}
		}
	}()
}

// awaitOOM waits for the counter to follow a notice: on v1 the notice comes
// when memory runs out, before the kernel has chosen whom to kill.
func (c *container) awaitOOM() bool {
	for deadline := time.Now().Add(oomDelay); time.Now().Before(deadline); time.Sleep(5 * time.Millisecond) {
		if c.countOOM(true) {
			return true
		}
	}
	return false
}

// countOOM reads the kernel's counter and reports whether it grew. systemd
// removes the cgroup of a container as soon as that is empty, which may be
// before we get to read: then a notice is the count.
func (c *container) countOOM(noticed bool) bool {
	kills, gone := readOOMKills(c.snapshot().Cgroups)
	c.mu.Lock()
	if gone && noticed {
		kills = c.oom.kills + 1
	}
	more := kills - c.oom.kills
	if more > 0 {
		c.oom.kills, c.oom.last = kills, time.Now()
	}
	c.mu.Unlock()
	if more > 0 {
		c.sup.claimOOMKills(c.oomParent(), more)
	}
	return more > 0
}

// oomParent is the cgroup that still knows of a container's OOM kills when
// systemd has removed the container's own: on version 2, events count in all
// cgroups above. "" on version 1, where nothing removes it before this does.
func (c *container) oomParent() string {
	cgroups := c.snapshot().Cgroups
	if _, v1 := cgroups["memory"]; v1 || cgroups[""] == "" {
		return ""
	}
	return filepath.Dir(cgroups[""])
}

// claimOOMKills notes that kills which a cgroup has counted were found to be
// those of one container below it.
func (s *Supervisor) claimOOMKills(parent string, kills int) {
	s.mu.Lock()
	s.oomClaims[parent] += kills
	s.mu.Unlock()
}

// unclaimedOOMKills are those that a cgroup has counted and no container has
// claimed: some lie before our time, or are those of others.
func (s *Supervisor) unclaimedOOMKills(parent string) int {
	s.mu.Lock()
	defer s.mu.Unlock()
	kills, _ := readOOMKills(map[string]string{"": parent})
	return kills - s.oomClaims[parent]
}

// killedByOOM reports whether lack of memory has ended the container: the
// kernel has killed init itself, and no other process did, or a child whose
// end init has passed on as its own.
func (c *container) killedByOOM(status syscall.WaitStatus) bool {
	window := oomWindow
	switch {
	case c.record.Bare:
		return false
	case status.Signaled() && status.Signal() == syscall.SIGKILL:
	case status.Exited() && status.ExitStatus() == oomExitStatus:
		window = oomChildWindow
	default:
		return false
	}
	c.countOOM(false)
	if _, gone := readOOMKills(c.snapshot().Cgroups); gone {
		select {
		case <-c.oomWatched: // the notices that came before the end are counted
		case <-time.After(oomDelay):
		}
		c.claimOOMKill()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.killed && c.oom.kills > 0 && time.Since(c.oom.last) < window
}

// claimOOMKill: of a container whose cgroup is gone, and whose last notice did
// not come (the kernel holds one back that follows another within 10 ms), the
// parent has a kill that is of no other child.
func (c *container) claimOOMKill() {
	parent := c.oomParent()
	if c.sup.unclaimedOOMKills(parent) <= c.oom.before {
		return
	}
	c.sup.claimOOMKills(parent, 1)
	c.mu.Lock()
	c.oom.kills, c.oom.last = c.oom.kills+1, time.Now()
	c.mu.Unlock()
}

// readOOMKills reads oom_kill of memory.events (v2) or memory.oom_control (v1,
// Linux 4.13). gone: the container's cgroup of v2 is not there any more.
func readOOMKills(cgroups map[string]string) (kills int, gone bool) {
	path := filepath.Join(cgroups[""], "memory.events")
	v1, hasV1 := cgroups["memory"]
	if hasV1 {
		path = filepath.Join(v1, "memory.oom_control")
	}
	content, err := os.ReadFile(path)
	if err != nil { // no cgroup, or no memory controller: no kills
		return 0, !hasV1 && isGone(cgroups[""])
	}
	for line := range strings.Lines(string(content)) {
		if count, ok := strings.CutPrefix(line, "oom_kill "); ok {
			kills, _ := strconv.Atoi(strings.TrimSpace(count))
			return kills, false
		}
	}
	return 0, false
}

func isGone(path string) bool {
	_, err := os.Stat(path)
	return path != "" && errors.Is(err, fs.ErrNotExist)
}
