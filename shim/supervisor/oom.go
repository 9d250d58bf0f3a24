package supervisor

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"github.com/minicri/minicri/shim/api"
)

const (
	// oomDelay is how long after its notice a kill may come.
	oomDelay = 500 * time.Millisecond

	// oomWindow is how far before the end of init an OOM kill may lie to be the
	// kill of init itself: what is killed has to run once more to end, and on a
	// busy machine it waits for a processor, as the shim does to see it.
	oomWindow = 10 * time.Second
)

// oomCount is how many processes of a container the kernel has killed.
type oomCount struct {
	kills int
	last  time.Time // when kills was seen to grow
}

// watchOOM follows the kernel's notices until the cgroup is gone.
func (c *container) watchOOM() {
	c.oomWatched = make(chan struct{})
	notices, err := c.lib.NotifyOOM()
	if err != nil {
		c.sup.log.Warn("OOM kills are seen only at the exit", "container", c.snapshot().ID, "error", err)
		close(c.oomWatched)
		return
	}
	go func() {
		defer close(c.oomWatched)
		for range notices {
			if c.awaitOOM() {
				c.sup.events.publish(api.EventKind_EVENT_OOM, c.state())
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

// countOOM reads the kernel's counter and tells whether it grew. systemd
// removes the cgroup of a container as soon as that is empty, which may be
// before we get to read: then a notice is the count.
func (c *container) countOOM(noticed bool) bool {
	kills, gone := readOOMKills(c.snapshot().Cgroups)
	c.mu.Lock()
	defer c.mu.Unlock()
	if gone && noticed {
		kills = c.oom.kills + 1
	}
	if kills <= c.oom.kills {
		return false
	}
	c.oom = oomCount{kills: kills, last: time.Now()}
	return true
}

// killedByOOM tells whether a SIGKILL that ended init was the kernel's, for
// lack of memory: neither ours, nor long after the kill of a child.
func (c *container) killedByOOM() bool {
	c.countOOM(false)
	if _, gone := readOOMKills(c.snapshot().Cgroups); gone {
		select {
		case <-c.oomWatched: // the notices that came before the end are counted
		case <-time.After(oomDelay):
		}
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	return !c.killed && c.oom.kills > 0 && time.Since(c.oom.last) < oomWindow
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
