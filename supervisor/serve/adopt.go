package serve

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"time"

	"golang.org/x/sync/errgroup"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/bundle"
	"github.com/minicri/minicri/supervisor/stdio"
)

// adoptAll adopts the containers of a dead supervisor, except those whose record cannot be used. A shortage of
// descriptors or memory says nothing about a container: then this supervisor does not serve, and the daemon
// starts another one.
func (s *Supervisor) adoptAll() error {
	records, err := os.ReadDir(filepath.Join(s.dir, api.RecordDir))
	if err != nil {
		return fmt.Errorf("list the records of containers: %w", err)
	}
	var adopting errgroup.Group
	adopting.SetLimit(runtime.GOMAXPROCS(0))
	for _, record := range records {
		id, isRecord := strings.CutSuffix(record.Name(), ".json")
		if !isRecord {
			_ = os.Remove(filepath.Join(s.dir, api.RecordDir, record.Name())) // a write that was cut off
			continue
		}
		adopting.Go(func() error {
			err := s.adopt(id)
			if err != nil && !stdio.IsShortage(err) {
				s.log.Error("a container is left alone: it cannot be adopted", "container", id, "error", err)
				return nil
			}
			return err
		})
	}
	if err := adopting.Wait(); err != nil {
		return fmt.Errorf("adopt the containers of an earlier supervisor: %w", err)
	}
	for _, c := range s.all() { // now that all are known: countOOMBefore counts what none of them has claimed
		if c.exit != nil {
			continue
		}
		c.killed = c.init.gone() // perhaps we killed it: then lack of memory is not to blame
		if !c.record.Bare && !c.init.gone() {
			c.countOOMBefore()
		}
		go c.awaitAdopted()
	}
	// Fifos of pipe.Open belong to no record.
	dir := filepath.Join(s.dir, api.StreamDir)
	fifos, err := os.ReadDir(dir)
	for _, entry := range fifos {
		if id, _, _ := strings.Cut(entry.Name(), "."); !s.hasRecord(id) { // ids have no dot
			err = errors.Join(err, stdio.Options{Dir: dir, ID: id}.RemoveFifos())
		}
	}
	return err
}

// adopt makes a container from its record, finds its process, and resumes its streams, unless it has ended
// and the log has all.
func (s *Supervisor) adopt(id string) error {
	var r record
	if err := bundle.ReadJSON(s.recordPath(id), &r); err != nil {
		return err
	}
	switch {
	case r.ID != id:
		return fmt.Errorf("its record is that of container %q", r.ID)
	case r.Version > api.RecordVersion:
		return fmt.Errorf("its record has version %d, and this build knows %d at most", r.Version, api.RecordVersion)
	}
	c := s.newContainer(r)
	close(c.created)
	if r.PID == 0 {
		go func() {
			err := c.remove(s.life)
			if err == nil {
				err = s.removeFiles(c.streamOptions())
			}
			s.log.Warn("tried to remove what was left of a container that was never made", "container", id, "error", err)
		}()
		return nil
	}
	exit := new(api.ExitRecord)
	err := bundle.ReadJSON(s.exitPath(id), exit)
	if stdio.IsShortage(err) {
		return err
	}
	switch ended := err == nil && exit.FinishedAt != 0; {
	case ended && !c.streamOptions().HasFifos():
		c.exit = exit
		close(c.exited)
		return s.reserve(c)
	case ended:
		c.left = exit
	default:
		if c.init, err = findProc(process.Facts{PID: r.PID, StartTime: r.StartTime}); err != nil {
			return err
		}
	}
	c.io, err = stdio.Adopt(c.streamOptions())
	left, execErr := c.leftExecs()
	if err := errors.Join(err, execErr); stdio.IsShortage(err) {
		c.io.Close()
		return errors.Join(err, c.init.close())
	} else if err != nil {
		s.log.Error("output of an adopted container is lost, or its execs run on", "container", id, "error", err)
	}
	c.io.Resume(func(err error) {
		s.log.Error("output of an adopted container is lost, or comes late", "container", id, "error", err)
	})
	c.checkStarted()
	if !r.Bare {
		c.countOOM()
	}
	go c.endLeftExecs(left) // it may take seconds
	return s.reserve(c)
}

// checkStarted undoes a start that is on disk and did not happen, because the predecessor died before it opened
// the barrier. Otherwise init becomes the program within barrierLimit.
func (c *container) checkStarted() {
	for deadline := time.Now().Add(barrierLimit); c.record.StartedAt != 0 && !c.init.gone(); time.Sleep(adoptedPause) {
		waits, err := beforeExec(c.record.PID)
		if err != nil || !waits {
			return
		}
		if time.Now().After(deadline) {
			c.setStarted(0)
		}
	}
}

// awaitAdopted waits for the end of an init that is not our child. If we killed it, its code says nothing new,
// and is not waited for long: whoever removes the container waits, too.
func (c *container) awaitAdopted() {
	c.init.awaitEnd()
	c.ended(errInitEnded)
	if c.left != nil {
		c.conclude(c.left)
		return
	}
	ended, limit := time.Now(), reapLimit
	c.mu.Lock()
	if c.killed {
		limit = reportLimit
	}
	c.mu.Unlock()
	reaped := false
	for deadline := ended.Add(limit); time.Now().Before(deadline); {
		if _, now := c.init.exiting(); now && !reaped {
			reaped, deadline = true, time.Now().Add(reportLimit)
		}
		if status, known := c.init.kernelExit(); known {
			c.finish(ended, status, true)
			return
		}
		select {
		case status := <-c.reported:
			c.finish(ended, status, true)
			return
		case <-time.After(adoptedPause):
		}
	}
	c.finish(ended, 0, false)
}

// hasRecord reports whether a container has a record, or may have one.
func (s *Supervisor) hasRecord(id string) bool {
	_, err := os.Lstat(s.recordPath(id))
	return !errors.Is(err, fs.ErrNotExist)
}
