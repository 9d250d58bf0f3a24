package serve

import (
	"errors"
	"os"
	"path/filepath"
	"syscall"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/runtime"
	"github.com/minicri/minicri/supervisor/stdio"
)

func (c *container) streamOptions() stdio.Options {
	return stdio.Options{Dir: filepath.Join(c.sup.dir, api.StreamDir), ID: c.record.ID, LogPath: c.record.LogPath, Terminal: c.record.Terminal, Bare: c.record.Bare, Shared: c.sup.shared, Keep: c.keepOutputs}
}

// keepOutputs has the pod's pause hold copies of what the container's output is
// read from, for the time when neither this process nor the daemon lives.
func (c *container) keepOutputs(outputs []*os.File) error {
	if c.record.Pause == "" {
		return errdefs.ErrNotFound
	}
	err := c.withSpares(func(s stdio.Spares) error { return s.Keep(c.record.ID, outputs...) })
	if err != nil {
		c.sup.log.Warn("the container can read its own output: its pod's pause cannot hold it open", "container", c.record.ID, "error", err)
	}
	return err
}

// keepInit has the pod's pause hold a pidfd of init: a successor that comes when init
// has ended and was reaped, with neither supervisor nor daemon there, asks the kernel
// by it. Where pause cannot hold it, such an exit is not known.
func (c *container) keepInit() {
	if c.record.Pause == "" {
		return
	}
	err := c.withSpares(func(s stdio.Spares) error { return s.Keep(c.record.ID, c.init.Handle()) })
	if err != nil && !errdefs.IsNotFound(err) {
		c.sup.log.Debug("pause holds no pidfd of a container", "container", c.record.ID, "error", err)
	}
}

// keptExit asks the kernel by the pidfd of keepInit. An error says that pause does not
// run, or is not found yet.
func (c *container) keptExit() (status syscall.WaitStatus, known bool, err error) {
	if c.record.Pause == "" {
		return 0, false, nil
	}
	err = c.withSpares(func(s stdio.Spares) error {
		return s.Find(c.record.ID, func(fd int) {
			if !known {
				status, known = runtime.ExitOf(fd)
			}
		})
	})
	return status, known, err
}

// releaseOutputs is for outputs that are in the log, or of no use, when the exit of
// init is known. What cannot be released ends with the pod.
func (c *container) releaseOutputs() {
	if c.record.Pause == "" {
		return
	}
	err := c.withSpares(func(s stdio.Spares) error { return s.Release(c.record.ID) })
	if err != nil && !errdefs.IsNotFound(err) && !errors.Is(err, os.ErrProcessDone) {
		c.sup.log.Warn("spare descriptors of a container's output are held as long as its pod", "container", c.record.ID, "error", err)
	}
}

// withSpares calls use with the spare descriptors of the container's pod.
func (c *container) withSpares(use func(stdio.Spares) error) error {
	pause, err := c.sup.lookUp(c.record.Pause)
	if err != nil {
		return err
	}
	init := pause.process()
	if init == nil {
		return os.ErrProcessDone
	}
	pause.sparing.Lock()
	defer pause.sparing.Unlock()
	var spares stdio.Spares
	defer func() { spares.Close() }()
	if spares.Receive, err = init.Descriptor(0); err != nil {
		return err
	}
	if spares.Send, err = init.Descriptor(1); err != nil {
		return err
	}
	return use(spares)
}
