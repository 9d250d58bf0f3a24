package doctor

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

// leaks compares what carries the node's mark with the records on disk. A record
// is written before anything is made, and removed after all is gone. One that
// cannot be read explains what it tells of, too.
func (c *checker) leaks() {
	hierarchies, err := cgroup.FindHierarchies()
	if err != nil {
		c.add("leaks", Problem, err.Error(), "")
		return
	}
	count := c.ofPods(hierarchies) + c.ofContainers(hierarchies)
	if count == 0 {
		c.add("leaks", Good, "none", "")
	}
	c.attachments()
	c.quarantine()
}

// ofPods returns how many orphans and errors there are.
func (c *checker) ofPods(hierarchies cgroup.Hierarchies) int {
	remains := &sandbox.Remains{
		Netns:       namespace.Find(c.Config.NetnsDir, c.Node.Mark()),
		Userns:      namespace.Find(filepath.Join(c.Config.State, "userns"), c.Node.Mark()),
		Hierarchies: hierarchies, Node: c.Node, State: c.Config.State,
		Attached: c.hasAttachment, Kill: time.Duration(c.Config.Limits.Kill),
	}
	// The record is asked for after the thing was found: a daemon may be at work.
	orphans, err := remains.Find(c.hasRecord)
	if err != nil {
		c.add("leaks", Problem, err.Error(), "")
		return len(orphans) + 1
	}
	for _, orphan := range orphans {
		c.leak(fmt.Sprintf("%s %s has no sandbox", orphan.Kind, orphan.Name), func() error { return remains.Remove(orphan) })
	}
	return len(orphans)
}

func (c *checker) ofContainers(hierarchies cgroup.Hierarchies) int {
	remains := &container.Remains{
		Hierarchies: hierarchies, Node: c.Node, Root: c.Config.Root, State: c.Config.State, Kill: time.Duration(c.Config.Limits.Kill),
	}
	orphans, err := remains.Find(c.hasContainer, c.hasRecord)
	for _, orphan := range orphans {
		c.leak(fmt.Sprintf("%s %s has no container", orphan.Kind, orphan.Name), func() error { return remains.Remove(orphan) })
	}
	count := len(orphans) + c.containersWithoutPod()
	if err != nil {
		c.add("leaks", Problem, err.Error(), "")
		count++
	}
	return count
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
		if err != nil || c.hasRecord(record.SandboxID) {
			continue // removed meanwhile, or for the daemon to put into quarantine
		}
		count++
		c.add("leak", Problem, fmt.Sprintf("container %s has no pod", id), "the daemon removes it when it starts")
	}
	return count
}

// snapshots are asked for where a daemon serves.
func (c *checker) snapshots(ctx context.Context) {
	keys, err := c.Snapshots(ctx)
	if err != nil {
		c.add("snapshots", Warning, fmt.Sprintf("not looked at: %v", err), "start the daemon: it removes those that no container owns")
		return
	}
	for _, key := range keys {
		c.add("leak", Problem, fmt.Sprintf("snapshot %s has no container", key), "the daemon removes it when it starts")
	}
}

func (c *checker) leak(message string, fix func() error) {
	finding := c.add("leak", Problem, message, "minicri check --fix removes it")
	finding.fix, finding.mended = fix, "removed"
}

func (c *checker) hasRecord(id string) bool     { return hasFile(c.recordDir(), id) }
func (c *checker) hasContainer(id string) bool  { return hasFile(c.containerDir(), id) }
func (c *checker) hasAttachment(id string) bool { return hasFile(c.attachmentDir(), id) }

// hasFile reports whether there is a record, also one in quarantine.
func hasFile(dir, id string) bool {
	_, err := os.Lstat(filepath.Join(dir, id+".json"))
	return err == nil || slices.ContainsFunc(state.Quarantined(dir), func(path string) bool { return state.IDOf(path) == id })
}

func (c *checker) recordDir() string     { return filepath.Join(c.Config.Root, "sandboxes") }
func (c *checker) containerDir() string  { return filepath.Join(c.Config.Root, "containers") }
func (c *checker) attachmentDir() string { return filepath.Join(c.Config.Root, "attachments") }

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
			continue // struck out meanwhile
		}
		if err != nil {
			c.add("attachment", Problem, fmt.Sprintf("%s: %v", id, err), "")
			continue
		}
		if attachment.Releasing || !c.hasRecord(id) {
			c.add("attachment", Problem,
				fmt.Sprintf("%s on network %q waits for CNI DEL, %d tries: %s", id, attachment.Network, attachment.Tries, attachment.LastError),
				"mend the plugin; the running daemon repeats DEL by itself")
		}
	}
}

// quarantine shows the records that cannot be decoded. They are tried again: a
// person may have mended them, or a later program may read them.
func (c *checker) quarantine() {
	for _, kind := range []struct {
		dir   string
		retry func(path string) error
	}{
		{c.recordDir(), sandbox.RetryRecord},
		{filepath.Join(c.Config.State, "facts"), sandbox.RetryFacts},
		{c.containerDir(), container.RetryRecord},
		{filepath.Join(c.Config.Root, "container-facts"), container.RetryFacts},
		{c.attachmentDir(), network.RetryAttachment},
	} {
		for _, file := range state.Quarantined(kind.dir) {
			finding := c.add("quarantine", Warning, file+" cannot be decoded, what it tells of is left alone",
				"mend it, then 'minicri check --fix' and restart the daemon; or give it up with --fix --force, and what it tells of is removed")
			finding.fix, finding.mended = func() error { return kind.retry(file) }, "done, restart the daemon"
			finding.force = func() error { return state.GiveUp(file) }
		}
	}
}

// sandboxes compares what the runtime believes of each sandbox with the kernel.
func (c *checker) sandboxes() {
	dir := filepath.Join(c.Config.State, "facts")
	ids, err := state.IDs(dir)
	if err != nil {
		c.add("sandboxes", Problem, err.Error(), "")
	}
	netns := namespace.Find(c.Config.NetnsDir, c.Node.Mark())
	for _, id := range ids {
		facts, err := state.Peek[sandbox.Facts](dir, id)
		if err != nil || !facts.Ready() {
			continue
		}
		if pause, err := process.Open(facts.Pause); err != nil {
			c.add("sandbox", Problem, fmt.Sprintf("%s is taken for ready, but its pause is gone: %v", id, err), "the kubelet makes the pod again")
		} else if err := pause.Close(); err != nil {
			c.add("sandbox", Problem, err.Error(), "")
		}
		if len(facts.Addresses) > 0 && !netns.Alive(id) {
			c.add("sandbox", Problem, id+" has lost its network namespace", "stop and remove the pod")
		}
	}
}
