package serve

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// oomExitStatus is how a shell, and with it most entry points, passes on that
// its child was killed by SIGKILL.
const oomExitStatus = 128 + int(syscall.SIGKILL)

// oomCount is how many processes of a container the kernel has killed.
type oomCount struct {
	kills  int
	before int // Supervisor.unclaimedOOMKills when the container was made, or adopted
}

// noteOOM notes what the kernel has counted when a container is made, or adopted.
func (c *container) noteOOM() {
	c.countOOM()
	before := c.sup.unclaimedOOMKills(c.oomParent())
	c.mu.Lock()
	c.oom.before = before
	c.mu.Unlock()
}

// countOOM reads the kernel's counter. gone: systemd removes the cgroup of a container as
// soon as that is empty, which may be before we get to read.
func (c *container) countOOM() (gone bool) {
	kills, gone := readOOMKills(c.snapshot().Cgroups)
	c.mu.Lock()
	more := kills - c.oom.kills
	if more > 0 {
		c.oom.kills = kills
	}
	c.mu.Unlock()
	if more > 0 {
		c.sup.claimOOMKills(c.oomParent(), more)
	}
	return gone
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

// killedByOOM reports whether lack of memory has ended the container: it ended by SIGKILL,
// or with the code of a child that did, nobody of ours has sent it, and the kernel has
// killed some process of it.
func (c *container) killedByOOM(status syscall.WaitStatus) bool {
	sigkill := status.Signaled() && status.Signal() == syscall.SIGKILL
	if c.record.Bare || !sigkill && !(status.Exited() && status.ExitStatus() == oomExitStatus) {
		return false
	}
	if gone := c.countOOM(); gone {
		c.claimOOMKill()
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.killed && c.oom.kills > 0
}

// claimOOMKill: of a container whose cgroup is gone, the parent may have a kill that is of
// no other child.
func (c *container) claimOOMKill() {
	parent := c.oomParent()
	if c.sup.unclaimedOOMKills(parent) <= c.oom.before {
		return
	}
	c.sup.claimOOMKills(parent, 1)
	c.mu.Lock()
	c.oom.kills++
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
