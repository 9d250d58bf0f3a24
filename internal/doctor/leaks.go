package doctor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

// leaks compares what carries the daemon's mark with the records on disk. A
// record is written before anything is made, and removed after all is gone.
func (c *checker) leaks() {
	remains, err := c.remains()
	if err != nil {
		c.add("leaks", Problem, err.Error(), "")
		return
	}
	// The record is asked for after the thing was found: a daemon may be at work.
	strays, err := remains.Find(c.hasRecord)
	if err != nil {
		c.add("leaks", Problem, err.Error(), "")
	}
	for _, stray := range strays {
		c.add("leak", Problem, fmt.Sprintf("%s %s has no sandbox", stray.Kind, stray.Name), "minicri check --fix removes it").
			fix = func() error { return remains.Remove(stray) }
	}
	if err == nil && len(strays) == 0 {
		c.add("leaks", Good, "none", "")
	}
	c.attachments()
	c.quarantine()
}

func (c *checker) hasRecord(id string) bool     { return hasFile(c.recordDir(), id) }
func (c *checker) hasAttachment(id string) bool { return hasFile(c.attachmentDir(), id) }

func hasFile(dir, id string) bool {
	_, err := os.Lstat(filepath.Join(dir, id+".json"))
	return err == nil
}

func (c *checker) recordDir() string     { return filepath.Join(c.Config.Root, "sandboxes") }
func (c *checker) attachmentDir() string { return filepath.Join(c.Config.Root, "attachments") }

func (c *checker) remains() (*sandbox.Remains, error) {
	hierarchies, err := cgroup.FindHierarchies()
	if err != nil {
		return nil, err
	}
	return &sandbox.Remains{
		Netns:       namespace.Find(c.Config.NetnsDir, c.Mark),
		Userns:      namespace.Find(filepath.Join(c.Config.State, "userns"), c.Mark),
		Hierarchies: hierarchies, Mark: c.Mark, State: c.Config.State,
		Attached: c.hasAttachment, Kill: time.Duration(c.Config.Limits.Kill),
	}, nil
}

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

func (c *checker) quarantine() {
	for _, kind := range []string{c.recordDir(), c.attachmentDir(), filepath.Join(c.Config.State, "facts")} {
		files, err := filepath.Glob(filepath.Join(kind, "quarantine", "*"))
		if err != nil {
			continue // the pattern is good
		}
		for _, file := range files {
			c.add("quarantine", Warning, file+" could not be read", "look at it, then delete it")
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
	netns := namespace.Find(c.Config.NetnsDir, c.Mark)
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
