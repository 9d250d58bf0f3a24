package doctor

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

// leaks compares what carries the node's mark with the records on disk. A record
// is written before anything is made, and removed after all is gone. One that
// cannot be read explains its pod or container, too.
func (c *checker) leaks() {
	hierarchies, err := cgroup.FindHierarchies()
	if err != nil {
		c.add("leaks", Problem, err.Error(), "")
		return
	}
	orphans := c.orphans(hierarchies) + c.factsWithoutRecord(c.factsDir(), c.recordDir()) + c.factsWithoutRecord(c.containerFactsDir(), c.containerDir())
	if c.containersWithoutPod()+orphans == 0 {
		c.add("leaks", Good, "none", "")
	}
	c.attachments()
	c.quarantine()
}

// orphans returns how many there are, and one more if not all places could be
// read. The record is asked for after the thing was found: a daemon may be at work.
func (c *checker) orphans(hierarchies cgroup.Hierarchies) int {
	places := &sweep.Places{
		Node: c.Node, Hierarchies: hierarchies,
		Netns:  namespace.Find(c.Config.NetnsDir, c.Node.Mark()),
		Userns: namespace.Find(filepath.Join(c.Config.State, "userns"), c.Node.Mark()),
		Root:   c.Config.Root, State: c.Config.State, Kill: time.Duration(c.Config.Limits.Kill),
	}
	orphans, err := places.Find(sweep.Owners{Pod: c.hasRecord, Container: c.hasContainer, Attached: c.hasAttachment})
	for _, o := range orphans {
		c.leak(fmt.Sprintf("%s %s has no %s", o.Kind, o.Path, o.Owner()), func() error { return places.Remove(o) })
	}
	if err != nil {
		c.add("leaks", Problem, err.Error(), "make it readable and run minicri check again")
		return len(orphans) + 1
	}
	return len(orphans)
}

// containersWithoutPod are records of containers whose pod has none.
func (c *checker) containersWithoutPod() (count int) {
	ids, err := state.IDs(c.containerDir())
	if err != nil {
		c.add("leaks", Problem, err.Error(), "")
		return 1
	}
	for _, id := range ids {
		record, err := state.Peek[container.Record](c.containerDir(), id)
		if err != nil || c.hasRecord(record.SandboxID) || !c.hasContainer(id) {
			continue // removed at the same time, or for the daemon to quarantine
		}
		count++
		c.add("leak", Problem, fmt.Sprintf("container %s has no pod", id), "the daemon removes it when it starts")
	}
	return count
}

// factsWithoutRecord are removed before their record. Where both go while it is looked,
// the facts are not there any more either.
func (c *checker) factsWithoutRecord(facts, records string) (count int) {
	ids, err := state.IDs(facts)
	if err != nil {
		c.add("leaks", Problem, err.Error(), "")
		return 1
	}
	for _, id := range ids {
		path := filepath.Join(facts, id+".json")
		if hasFile(records, id) {
			continue
		}
		if _, err := os.Lstat(path); err == nil {
			count++
			c.leak(path+" has no record", func() error { return os.Remove(path) })
		}
	}
	return count
}

func (c *checker) leak(message string, fix func() error) {
	finding := c.add("leak", Problem, message, "minicri check --fix removes it")
	finding.fix, finding.fixed = fix, "removed"
}

func (c *checker) hasRecord(id string) bool     { return hasFile(c.recordDir(), id) }
func (c *checker) hasContainer(id string) bool  { return hasFile(c.containerDir(), id) }
func (c *checker) hasAttachment(id string) bool { return hasFile(c.attachmentDir(), id) }

// hasFile reports whether there is a record, also one in quarantine, or may be one.
func hasFile(dir, id string) bool {
	if _, err := os.Lstat(filepath.Join(dir, id+".json")); !errors.Is(err, fs.ErrNotExist) {
		return true
	}
	quarantined, err := state.Quarantined(dir)
	return err != nil || slices.ContainsFunc(quarantined, func(path string) bool { return state.IDOf(path) == id })
}

func (c *checker) recordDir() string         { return filepath.Join(c.Config.Root, "sandboxes") }
func (c *checker) factsDir() string          { return filepath.Join(c.Config.State, "facts") }
func (c *checker) containerDir() string      { return filepath.Join(c.Config.Root, "containers") }
func (c *checker) containerFactsDir() string { return filepath.Join(c.Config.Root, "container-facts") }
func (c *checker) attachmentDir() string     { return filepath.Join(c.Config.Root, "attachments") }

// attachments that no sandbox owns any more wait for their DEL to succeed.
func (c *checker) attachments() {
	dir := c.attachmentDir()
	ids, err := state.IDs(dir)
	if err != nil {
		c.add("attachments", Problem, err.Error(), "")
	}
	for _, id := range ids {
		attachment, err := state.Peek[network.Attachment](dir, id)
		if errors.Is(err, os.ErrNotExist) {
			continue // removed at the same time
		}
		if err != nil {
			c.add("attachment", Problem, fmt.Sprintf("%s: %v", id, err), "")
			continue
		}
		if attachment.Releasing || !c.hasRecord(id) && c.hasAttachment(id) {
			f := c.add("attachment", Problem,
				fmt.Sprintf("%s on network %q waits for CNI DEL, %d tries: %s", id, attachment.Network, attachment.Tries, attachment.LastError),
				"repair the plugin, and the daemon's next DEL succeeds; or give it up with 'minicri check --fix --force "+id+"': its plugins may keep an address of it")
			if slices.Contains(c.GiveUp, id) {
				f.fix, f.fixed = func() error { return c.giveUp(id) }, "given up; a daemon that runs notices it with its next DEL"
			}
		}
	}
}

// giveUp removes the entry of an attachment that waits for its DEL, and its namespace.
func (c *checker) giveUp(id string) error {
	if err := os.Remove(filepath.Join(c.attachmentDir(), id+".json")); err != nil {
		return err
	}
	return namespace.Find(c.Config.NetnsDir, c.Node.Mark()).Remove(id)
}

// quarantine shows the records that cannot be decoded. They are tried again: a
// person may have repaired them, or a later program may read them.
func (c *checker) quarantine() {
	for _, kind := range []struct {
		dir   string
		retry func(path string) error
	}{
		{c.recordDir(), sandbox.RetryRecord},
		{c.factsDir(), sandbox.RetryFacts},
		{c.containerDir(), container.RetryRecord},
		{c.containerFactsDir(), container.RetryFacts},
		{c.attachmentDir(), network.RetryAttachment},
	} {
		files, err := state.Quarantined(kind.dir)
		if err != nil {
			c.add("quarantine", Problem, err.Error(), "repair the disk or the directory: until then the daemon does not start")
		}
		for _, file := range files {
			finding := c.add("quarantine", Problem, file+" cannot be decoded: its object is left alone",
				"repair the file, run 'minicri check --fix' and restart the daemon; or give it up with --fix --force: the next start removes what it describes")
			finding.fix, finding.fixed = func() error { return kind.retry(file) }, "put back, restart the daemon"
			finding.force = func() error { return state.GiveUp(file) }
		}
		c.unread(kind.dir)
	}
}

// unread shows the records that cannot be read, which stay where they are.
func (c *checker) unread(dir string) {
	ids, err := state.IDs(dir)
	if err != nil {
		c.add("records", Problem, err.Error(), "")
	}
	for _, id := range ids {
		if _, err := state.ReadFile(filepath.Join(dir, id+".json")); err != nil && !errors.Is(err, fs.ErrNotExist) {
			c.add("records", Problem, fmt.Sprintf("a record cannot be read, and its object is left alone: %v", err), "repair the disk or the file, and restart the daemon")
		}
	}
}

// sandboxes compares what the runtime believes of each sandbox with the kernel. A
// daemon knows of a pod's end before it takes anything of it away, and writes it down
// last: what looks wrong by the files is asked of it.
func (c *checker) sandboxes() {
	dir := c.factsDir()
	ids, err := state.IDs(dir)
	if err != nil {
		c.add("sandboxes", Problem, err.Error(), "")
	}
	netns := namespace.Find(c.Config.NetnsDir, c.Node.Mark())
	for _, id := range ids {
		facts, err := state.Peek[sandbox.Facts](dir, id)
		if err != nil || !facts.Ready() || !c.hasRecord(id) {
			continue
		}
		pause, err := process.Open(facts.Pause)
		lost := len(facts.Addresses) > 0 && !netns.Alive(id)
		if (err != nil || lost) && c.Ended != nil && c.Ended(id) {
			if err == nil {
				_ = pause.Close()
			}
			continue
		}
		if err != nil && !errors.Is(err, process.ErrGone) {
			c.add("sandbox", Problem, fmt.Sprintf("whether the pause process of %s runs cannot be known: %v", id, err), "look for what keeps root from /proc")
		} else if err != nil {
			c.add("sandbox", Problem, fmt.Sprintf("%s is recorded as Ready, but its pause process is gone: %v", id, err), "the daemon notices when it starts, and the kubelet makes the pod again")
		} else if err := pause.Close(); err != nil {
			c.add("sandbox", Problem, err.Error(), "")
		}
		if lost {
			c.add("sandbox", Problem, id+" has lost its network namespace", "stop and remove the pod")
		}
	}
}
