package supervisor

import (
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/runtime"
	"github.com/minicri/minicri/shim/stdio"
)

// adoptAll takes over what a shim that died has left. A record that cannot be
// used is reported and set aside; it never keeps the others from being served.
func (s *Supervisor) adoptAll() error {
	records, err := filepath.Glob(filepath.Join(s.dir, "records", "*.json"))
	if err != nil {
		return err
	}
	for _, path := range records {
		if err := s.adopt(path); err != nil {
			s.log.Error("a container cannot be adopted, its record is set aside", "record", path, "error", err)
			_ = os.Rename(path, strings.TrimSuffix(path, ".json")+".bad")
		}
	}
	return nil
}

func (s *Supervisor) adopt(path string) error {
	c := &container{sup: s, adopted: true, made: true, exited: make(chan struct{}), oomWatched: make(chan struct{}), execs: map[string]*exec{}, killed: true}
	if err := readJSON(path, &c.record); err != nil {
		return err
	}
	id := c.record.ID
	loaded, err := s.runtimeOf(c.record).Load(id)
	if err != nil && !errdefs.IsNotFound(err) {
		return err
	}
	if err == nil {
		c.runtime = loaded
	}
	if err := s.reserve(c); err != nil {
		return err
	}
	if err := readJSON(filepath.Join(s.dir, api.ExitDir, id+".json"), &c.exit); err == nil && c.exit != nil {
		close(c.exited)
		return nil
	}
	c.exit = nil
	c.adoptStreams()
	if c.init, err = runtime.Find(c.record.PID, c.record.StartTime); err != nil {
		c.finish(0, false)
		return nil
	}
	c.killed = false
	c.checkStarted()
	c.oom.kills, _ = readOOMKills(c.record.Cgroups)
	if c.runtime != nil {
		if err := c.runtime.EndExecs(); err != nil {
			s.log.Warn("execs of the shim that died may still run", "container", id, "error", err)
		}
		c.watchOOM()
	}
	go c.awaitInit()
	return nil
}

// adoptStreams goes on reading the fifos. A terminal is lost with its shim.
func (c *container) adoptStreams() {
	var err error
	if c.io, err = stdio.Adopt(c.streamOptions()); err != nil {
		c.sup.log.Error("output of an adopted container is lost", "container", c.record.ID, "error", err)
	}
	c.io.Run()
}

// execPatience is how long init may take from the barrier to the program.
const execPatience = 100 * time.Millisecond

// checkStarted takes back a start that is on disk and did not come to pass: the
// predecessor died before it opened the barrier.
func (c *container) checkStarted() {
	for deadline := time.Now().Add(execPatience); c.record.StartedAt != 0; time.Sleep(time.Millisecond) {
		waits, err := beforeExec(c.record.PID)
		if err != nil || !waits {
			return
		}
		if time.Now().After(deadline) {
			c.setStarted(0)
		}
	}
}
