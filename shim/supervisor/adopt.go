package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	gort "runtime"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/runtime"
	"github.com/minicri/minicri/shim/stdio"
)

// adoptAll takes over what a supervisor that died has left, or an upgrade hands over:
// first all streams, for which programs wait, then processes, several at a time; what
// else there is to do waits until the supervisor serves (settleAll). A record that cannot
// be used is quarantined and made anew; it never keeps the others from being served.
// What cannot be read costs no container anything: it is left alone, or tried again.
func (s *Supervisor) adoptAll(h *handover) error {
	recorded, err := s.recorded()
	if err != nil {
		return err
	}
	found := make([]*container, len(recorded))
	places := gort.GOMAXPROCS(0)
	several(places, len(recorded), func(i int) { found[i] = s.adoptOrReport(recorded[i], h) })
	found = slices.DeleteFunc(found, func(c *container) bool { return c == nil })
	if h.PausedAt != 0 {
		s.paused = h.pause()
	}
	several(places, len(found), func(i int) { found[i].adoptProcess() })
	if err := s.removeUnused(); err != nil {
		s.log.Warn("files of records that are not used stay", "error", err)
	}
	return s.removeUnrecorded(recorded)
}

// several calls do for 0 to n-1, for as many at a time as there are places.
func several(places, n int, do func(int)) {
	var wait sync.WaitGroup
	var next atomic.Int64
	for range min(n, places) {
		wait.Go(func() {
			for i := next.Add(1) - 1; i < int64(n); i = next.Add(1) - 1 {
				do(int(i))
			}
		})
	}
	wait.Wait()
}

// removeUnrecorded removes what is left of a create that was cut off before the
// container had a record, whose fifos are made before its state.
func (s *Supervisor) removeUnrecorded(recorded []string) error {
	known := make(map[string]bool, len(recorded))
	for _, id := range recorded {
		known[id] = true
	}
	states, err := os.ReadDir(s.stateDir())
	if err != nil {
		return err
	}
	fifos, err := os.ReadDir(filepath.Join(s.dir, api.StreamDir))
	if err != nil {
		return err
	}
	for _, entry := range append(states, fifos...) {
		id := strings.TrimSuffix(entry.Name(), filepath.Ext(entry.Name())) // ids have no dot
		if known[id] || s.hasRecord(id) {
			continue
		}
		left, err := s.builtin.Load(id)
		switch {
		case err == nil:
			err = left.Delete()
		case errdefs.IsNotFound(err): // no more than a directory
			err = s.builtin.Discard(id)
		}
		err = errors.Join(err, stdio.RemoveFifos(filepath.Join(s.dir, api.StreamDir), id))
		s.log.Warn("removed what was left of a container that was never made", "container", id, "error", err)
	}
	return nil
}

// adoptRecord makes a container of its record, and continues with its streams unless
// it has ended.
func (s *Supervisor) adoptRecord(path string, from *handover) (*container, error) {
	c := &container{sup: s, adopted: true, made: true, exited: make(chan struct{}), reported: make(chan parentsWord, 1), oomWatched: make(chan struct{}), execs: map[string]*exec{}, killed: true}
	if err := readJSON(path, &c.record); err != nil {
		return nil, err
	}
	if id := recordedID(path); c.record.ID != id {
		return nil, fmt.Errorf("it is the record of container %q", c.record.ID)
	}
	h, upgraded := from.of(c.record.ID)
	c.adopted = !upgraded || h.Adopted
	if err := s.reserve(c); err != nil {
		return nil, err
	}
	if exit, err := c.readExit(); err == nil {
		c.exit = exit
		close(c.exited)
		return c, nil
	}
	from.take(c.record.ID) // its descriptors have an owner now
	c.adoptStreams(h.streams())
	c.stdinOnce = h.StdinOnce
	c.killed = h.Killed
	return c, nil
}

const (
	// reapTimeout is how long the parent of an adopted init may take to reap it, on a
	// busy machine: then the kernel has its status (Linux 6.15), and the parent reports
	// it, if it is the daemon, within reportTimeout.
	reapTimeout   = 10 * time.Second
	reportTimeout = 2500 * time.Millisecond
	exitPoll      = 2 * time.Millisecond
	keptPoll      = 20 * time.Millisecond
)

// awaitAdopted waits for an init that is not our child.
func (c *container) awaitAdopted() {
	_ = c.init.Ended()
	ended := time.Now()
	c.sup.changes.RLock() // as in awaitInit
	defer c.sup.changes.RUnlock()
	deadline, reaped := ended.Add(c.reapTimeout()), false
	for time.Now().Before(deadline) {
		if !reaped && c.init.Reaped() {
			reaped, deadline = true, time.Now().Add(reportTimeout)
		}
		if status, known := c.init.KernelExit(); known {
			c.finish(ended, status, true)
			return
		}
		select {
		case said := <-c.reported:
			c.finish(ended, said.status, true)
			return
		case <-time.After(exitPoll):
		}
	}
	c.finish(ended, 0, false)
}

// reapTimeout is shorter for an init that we have killed: its code says no more than
// that, and who removes the container waits.
func (c *container) reapTimeout() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.killed {
		return reportTimeout
	}
	return reapTimeout
}

// askParent asks the parent of an adopted init for its exit, if that is a process
// which does not end with it.
func (c *container) askParent() {
	if !c.record.Task {
		return
	}
	loaded, err := c.loaded()
	if err != nil {
		if !errdefs.IsNotFound(err) {
			c.sup.log.Error("a container is adopted without its state: what needs that tries to read it again", "container", c.record.ID, "error", err)
		}
		return
	}
	parent, lives := loaded.(runtime.Parent)
	if !lives {
		return
	}
	go func() {
		if status, at, known := parent.Exit(); known {
			c.noteExit(parentsWord{status, at})
		}
	}()
}

// awaitParent is awaitAdopted for an init that was gone when we came.
func (c *container) awaitParent() {
	ended := time.Now()
	c.sup.changes.RLock() // as in awaitInit
	defer c.sup.changes.RUnlock()
	asked := false
	for deadline := ended.Add(reportTimeout); time.Now().Before(deadline); {
		if !asked {
			status, known, err := c.keptExit()
			if known {
				c.finish(ended, status, true)
				return
			}
			asked = err == nil // else pause may be found later
		}
		select {
		case said := <-c.reported:
			c.finish(said.when(c.snapshot(), ended), said.status, true)
			return
		case <-time.After(keptPoll):
		}
	}
	c.finish(ended, 0, false)
}

// parentsWord is what the parent of an adopted init says of its end.
type parentsWord struct {
	status syscall.WaitStatus
	at     time.Time // the zero time if it does not say when
}

// when is the time that the parent says, if the container can have ended then: it was
// made before, and gone by the time at which it was looked for.
func (w parentsWord) when(of record, gone time.Time) time.Time {
	if w.at.IsZero() || w.at.UnixNano() < max(of.CreatedAt, of.StartedAt) || w.at.After(gone) {
		return gone
	}
	return w.at
}

// noteExit keeps what the parent has reported; the first counts.
func (c *container) noteExit(said parentsWord) {
	select {
	case c.reported <- said:
	default: // our own child, or reported before
	}
}

const (
	// openLimit is how long the log of an adopted container may take to be opened;
	// nextOpenLimit when another one has taken longer: their disk hangs.
	openLimit     = time.Second
	nextOpenLimit = 5 * time.Millisecond
)

// adoptStreams continues to read the fifos. A terminal and an input are lost with
// their supervisor unless they are handed over. For a log on a disk that hangs neither
// the others wait nor calls: its container has no streams until it can be opened, and
// no upgrade can be done, which would lose what is handed over.
func (c *container) adoptStreams(handed stdio.Handed) {
	c.ioAdopted = make(chan struct{})
	c.sup.changes.RLock()
	go func() { // ends when the log is open, or cannot be opened
		defer c.sup.changes.RUnlock()
		defer close(c.ioAdopted)
		streams, err := stdio.Adopt(c.streamOptions(), handed)
		if err != nil {
			c.sup.log.Error("output of an adopted container is lost, or comes late", "container", c.record.ID, "error", err)
		}
		c.mu.Lock()
		c.io = streams
		c.mu.Unlock()
		streams.Run()
	}()
	limit := openLimit
	if c.sup.logsHang.Load() {
		limit = nextOpenLimit
	}
	select {
	case <-c.ioAdopted:
	case <-time.After(limit):
		c.sup.logsHang.Store(true)
		c.sup.log.Error("the log of an adopted container takes long to be opened, its disk may hang: output waits", "container", c.record.ID, "log", c.record.LogPath)
	}
}

// releaseHanded releases what is held for streams until they are adopted: by a standby,
// and in the journal.
func (s *Supervisor) releaseHanded(outputs []int) {
	for _, c := range s.all() {
		if c.ioAdopted != nil {
			<-c.ioAdopted
		}
	}
	closeDescriptors(outputs)
	s.journal.ReleaseRest()
}

// execTimeout is how long init may take from the barrier to the program.
const execTimeout = 100 * time.Millisecond

// checkStarted undoes a start that is on disk and did not happen: the
// predecessor died before it opened the barrier.
func (c *container) checkStarted() {
	for deadline := time.Now().Add(execTimeout); c.record.StartedAt != 0; time.Sleep(time.Millisecond) {
		waits, err := beforeExec(c.record.PID)
		if err != nil || !waits {
			return
		}
		if time.Now().After(deadline) {
			c.setStarted(0)
		}
	}
}
