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
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/errgroup"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/runtime"
	"github.com/minicri/minicri/supervisor/stdio"
)

// adoptAll takes over what a supervisor that died has left; what else there is to do
// waits until the supervisor serves (settleAll). A record that cannot be used never
// keeps the others from being served, and costs its container nothing: it is left
// alone. Want of descriptors or memory says nothing of any container: this supervisor
// does not serve then, and the daemon starts another one.
func (s *Supervisor) adoptAll() error {
	recorded, err := s.recorded()
	if err != nil {
		return err
	}
	var adopting errgroup.Group
	adopting.SetLimit(gort.GOMAXPROCS(0))
	for _, id := range recorded {
		adopting.Go(func() error {
			err := s.adopt(id)
			if err != nil && !isShortage(err) {
				s.log.Error("a container is left alone: it cannot be adopted", "container", id, "error", err)
				return nil
			}
			return err
		})
	}
	if err := errors.Join(adopting.Wait(), s.awaitStreams()); err != nil {
		return fmt.Errorf("adopt the containers of an earlier supervisor: %w", err)
	}
	return s.removeUnrecorded()
}

func isShortage(err error) bool {
	return slices.ContainsFunc([]error{syscall.EMFILE, syscall.ENFILE, syscall.ENOMEM}, func(kind error) bool { return errors.Is(err, kind) })
}

// removeUnrecorded removes what belongs to no record: writes of one that were cut off,
// and pipes (stdio.OpenPipes).
func (s *Supervisor) removeUnrecorded() error {
	cut, _ := filepath.Glob(filepath.Join(s.dir, api.RecordDir, "*.new")) // a good pattern
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

// adopt makes a container of its record, finds its process, and continues with its
// streams unless it has ended. One whose creation was cut off is removed later.
func (s *Supervisor) adopt(id string) error {
	var r record
	if err := readJSON(s.recordPath(id), &r); err != nil {
		return err
	}
	switch {
	case r.ID != id:
		return fmt.Errorf("its record is that of container %q", r.ID)
	case r.Version > api.RecordVersion:
		return fmt.Errorf("its record has version %d, and this build knows %d at most", r.Version, api.RecordVersion)
	}
	c := s.newContainer(r)
	c.adopted = true
	close(c.created)
	if r.PID == 0 {
		s.mu.Lock()
		s.cutOff = append(s.cutOff, c)
		s.mu.Unlock()
		return nil
	}
	exit, err := c.readExit()
	switch {
	case err == nil:
		c.exit, c.execsEnded = exit, true
		close(c.exited)
		return s.reserve(c)
	case isShortage(err):
		return err
	}
	if c.init, err = runtime.Find(process.Facts{PID: r.PID, StartTime: r.StartTime}); err != nil {
		return err
	}
	c.execsEnded = c.init.Gone() // with the rest of the container: finish
	c.checkStarted()
	if !r.Bare {
		c.countOOM() // before the first noteOOM, which counts what no container has claimed
	}
	c.follow = sync.OnceFunc(c.watch)
	go c.adoptStreams() // ends when the log is open, or cannot be opened
	return s.reserve(c)
}

// readExit reads how the container has ended, as a predecessor has written it.
func (c *container) readExit() (*api.ExitRecord, error) {
	path, exit := c.sup.exitPath(c.record.ID), new(api.ExitRecord)
	err := readJSON(path, exit)
	if err == nil && exit.FinishedAt == 0 {
		err = fmt.Errorf("%s does not say when", path)
	}
	return exit, err
}

// adoptStreams continues to read the fifos. A terminal and an input are lost with
// their supervisor.
func (c *container) adoptStreams() {
	defer close(c.ioAdopted)
	streams, err := stdio.Adopt(c.streamOptions())
	if err != nil {
		c.sup.log.Error("output of an adopted container is lost, or comes late", "container", c.record.ID, "error", err)
	}
	c.mu.Lock()
	c.io, c.ioProblem = streams, err
	c.mu.Unlock()
	if isShortage(err) {
		c.sup.stop() // serving or not: an output that nobody reads holds up who writes, and the next one tries again
	}
	streams.Run()
}

// openLimit is how long the logs of adopted containers may take to be opened, until the
// supervisor serves without those that hang with their disk.
const openLimit = time.Second

// awaitStreams waits for the streams of all adopted containers. For a log on a disk that
// hangs neither the others wait nor calls: its container has no streams until it can be
// opened.
func (s *Supervisor) awaitStreams() error {
	late := time.After(openLimit)
	for _, c := range s.all() {
		if c.follow == nil {
			continue
		}
		select {
		case <-c.ioAdopted:
			if isShortage(c.ioProblem) {
				return c.ioProblem
			}
		case <-late:
			s.log.Error("logs of adopted containers take long to be opened, a disk may hang: output waits", "container", c.record.ID, "log", c.record.LogPath)
			return nil
		}
	}
	return nil
}

// releaseJournal releases what the journal holds for streams until they are adopted.
func (s *Supervisor) releaseJournal() {
	for _, c := range s.all() {
		if c.follow != nil {
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
		waits, err := beforeExec(c.snapshot().PID)
		if err != nil || !waits {
			return
		}
		if time.Now().After(deadline) {
			c.setStarted(0)
		}
	}
}

// watchAdopted continues what the predecessor did for a container that was adopted, as
// soon as the supervisor serves, or before a call that is for the container.
func (c *container) watchAdopted() {
	if c.follow != nil {
		c.follow()
	}
}

// watch has the end of an adopted container seen.
func (c *container) watch() {
	c.mu.Lock()
	c.killed = c.killed || c.init.Gone() // perhaps, and that is enough not to blame lack of memory
	c.mu.Unlock()
	if !c.record.Bare && !c.init.Gone() {
		c.noteOOM()
	}
	go c.awaitAdopted()
}

const (
	// reapTimeout is how long the parent of an adopted init may take to reap it, on a
	// busy machine: then the kernel has its status (Linux 6.15), and the parent reports
	// it, if it is the daemon, within reportTimeout.
	reapTimeout   = 10 * time.Second
	reportTimeout = 2500 * time.Millisecond
	exitPoll      = 2 * time.Millisecond
)

// awaitAdopted waits for the end of an init that is not our child.
func (c *container) awaitAdopted() {
	_ = c.init.Ended()
	close(c.ended)
	ended, reaped := time.Now(), false
	for deadline := ended.Add(c.reapTimeout()); time.Now().Before(deadline); {
		if !reaped && c.init.Reaped() {
			reaped, deadline = true, time.Now().Add(reportTimeout)
		}
		if status, known := c.init.KernelExit(); known {
			c.finish(ended, status, true)
			return
		}
		select {
		case status := <-c.reported:
			c.finish(ended, status, true)
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

// noteExit keeps what the parent has reported; the first counts.
func (c *container) noteExit(status syscall.WaitStatus) {
	select {
	case c.reported <- status:
	default: // our own child, or reported before
	}
}

// mostSettled is of how many containers at a time the execs are ended: each may be waited
// for, so there are more than processors.
const mostSettled = 32

// settleAll does what can wait until the supervisor serves: first no end goes unseen.
func (s *Supervisor) settleAll() {
	all := s.all()
	for _, c := range all {
		c.watchAdopted()
	}
	var settling errgroup.Group
	settling.SetLimit(mostSettled)
	for _, c := range all {
		settling.Go(c.endLeftExecs)
	}
	for _, c := range s.cutOff {
		settling.Go(c.removeCutOff)
	}
	_ = settling.Wait() // each has logged what is wrong
}

// removeCutOff removes a container whose creation was cut off, with what it had started.
func (c *container) removeCutOff() error {
	err := c.runtime.Delete(c.sup.life)
	if err == nil {
		err = c.removeFiles()
	}
	c.sup.log.Warn("removed what was left of a container that was never made", "container", c.record.ID, "error", err)
	return err
}

// endLeftExecs ends the execs whose streams nobody has any more, before the first one of
// ours is started, which would be taken for one of them. It may take seconds. An error
// says that they cannot be known now, and are to be ended later.
func (c *container) endLeftExecs() error {
	c.ending.Lock()
	defer c.ending.Unlock()
	if c.execsEnded {
		return nil
	}
	err := c.runtime.EndExecs()
	if errdefs.IsUnavailable(err) {
		return fmt.Errorf("end the execs of container %s that an earlier supervisor has left: %w", c.record.ID, err)
	}
	if err != nil && !c.hasEnded() {
		c.sup.log.Warn("execs that no client waits for may still run", "container", c.record.ID, "error", err)
	}
	c.execsEnded = true
	return nil
}
