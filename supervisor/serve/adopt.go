package serve

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

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/stdio"
)

// adoptAll takes over what a supervisor that died has left: first all streams, for
// which programs wait, then processes, several at a time; what else there is to do
// waits until the supervisor serves (settleAll). A record that cannot be used never
// keeps the others from being served, and costs its container nothing: it is left alone.
func (s *Supervisor) adoptAll() error {
	recorded, err := s.recorded()
	if err != nil {
		return err
	}
	found := make([]*container, len(recorded))
	places := gort.GOMAXPROCS(0)
	several(places, len(recorded), func(i int) {
		var err error
		if found[i], err = s.adoptRecord(recorded[i]); err != nil {
			s.log.Error("a container is left alone: its record cannot be used", "container", recorded[i], "error", err)
		}
	})
	found = slices.DeleteFunc(found, func(c *container) bool { return c == nil })
	several(places, len(found), func(i int) { found[i].adoptProcess() })
	return s.removeUnrecorded()
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

// removeUnrecorded removes what belongs to no record: writes of one that were cut off,
// and pipes (stdio.OpenPipes).
func (s *Supervisor) removeUnrecorded() error {
	cut, _ := filepath.Glob(filepath.Join(s.dir, recordsDir, "*.new")) // a good pattern
	fifos, err := os.ReadDir(filepath.Join(s.dir, api.StreamDir))
	for _, path := range cut {
		err = errors.Join(err, os.Remove(path))
	}
	for _, entry := range fifos {
		if id, _, _ := strings.Cut(entry.Name(), "."); !s.hasRecord(id) { // ids have no dot
			err = errors.Join(err, stdio.RemoveFifos(filepath.Join(s.dir, api.StreamDir), id))
		}
	}
	return err
}

// adoptRecord makes a container of its record, and continues with its streams unless
// it has ended. One whose creation was cut off is removed later: it is nil.
func (s *Supervisor) adoptRecord(id string) (*container, error) {
	var r record
	if err := readJSON(s.recordPath(id), &r); err != nil {
		return nil, err
	}
	switch {
	case r.ID != id:
		return nil, fmt.Errorf("it is the record of container %q", r.ID)
	case r.Version > recordVersion:
		return nil, fmt.Errorf("it has version %d, and this build knows %d at most", r.Version, recordVersion)
	}
	c := s.newContainer(r)
	c.adopted, c.made = true, true
	if r.PID == 0 {
		s.mu.Lock()
		s.cutOff = append(s.cutOff, c)
		s.mu.Unlock()
		return nil, nil
	}
	if err := s.reserve(c); err != nil {
		return nil, err
	}
	if exit, err := c.readExit(); err == nil {
		c.exit = exit
		close(c.exited)
		return c, nil
	}
	c.adoptStreams()
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

// awaitParent is awaitAdopted for an init that was gone when we came.
func (c *container) awaitParent() {
	ended := time.Now()
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
// their supervisor. For a log on a disk that hangs neither the others wait nor calls:
// its container has no streams until it can be opened.
func (c *container) adoptStreams() {
	c.ioAdopted = make(chan struct{})
	go func() { // ends when the log is open, or cannot be opened
		defer close(c.ioAdopted)
		streams, err := stdio.Adopt(c.streamOptions())
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

// releaseJournal releases what the journal holds for streams until they are adopted.
func (s *Supervisor) releaseJournal() {
	for _, c := range s.all() {
		if c.ioAdopted != nil {
			<-c.ioAdopted
		}
	}
	s.journal.ReleaseRest()
}

// execTimeout is how long init may take from the barrier to the program.
const execTimeout = 100 * time.Millisecond

// checkStarted undoes a start that is on disk and did not happen: the
// predecessor died before it opened the barrier.
func (c *container) checkStarted() {
	for deadline := time.Now().Add(execTimeout); c.record.StartedAt != 0; time.Sleep(time.Millisecond) {
		waits, err := c.beforeExec()
		if err != nil || !waits {
			return
		}
		if time.Now().After(deadline) {
			c.setStarted(0)
		}
	}
}
