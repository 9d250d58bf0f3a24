package supervisor

import (
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/runtime"
	"github.com/minicri/minicri/shim/stdio"
)

// quarantined is where a record goes that cannot be used, until its container is
// deleted.
func quarantined(record string) string { return strings.TrimSuffix(record, ".json") + ".bad" }

func (s *Supervisor) quarantine(path string, cause error) {
	s.log.Error("a container cannot be adopted, its record is quarantined", "record", path, "error", cause)
	_ = os.Rename(path, quarantined(path))
}

// copied is where the record is once more, as it was when the container was made:
// all but whether it was started, which can be seen.
func copied(record string) string { return strings.TrimSuffix(record, ".json") + ".copy" }

// rebuild makes the record of a container anew, one that cannot be used is no reason
// to end it.
func (s *Supervisor) rebuild(id string) error {
	var r record
	err := readJSON(copied(s.recordPath(id)), &r)
	if err == nil && r.ID != id {
		err = fmt.Errorf("the copy of its record is that of container %q", r.ID)
	}
	if err != nil {
		return errors.Join(err, s.rebuildByState(id))
	}
	r.StartedAt = r.CreatedAt // checkStarted looks at it
	return writeJSON(s.recordPath(id), r)
}

// rebuildByState: libcontainer knows the process and the cgroups of its containers,
// and they have fifos unless they have a terminal, or no output at all. Only where
// the log is is lost.
func (s *Supervisor) rebuildByState(id string) error {
	init, err := s.builtin.Init(id)
	if err != nil {
		return fmt.Errorf("it is not known to libcontainer: %w", err)
	}
	r := record{
		Version: recordVersion, ID: id, PID: init.PID, StartTime: init.StartTime, Cgroups: init.Cgroups,
		CreatedAt: init.Created.UnixNano(), StartedAt: init.Created.UnixNano(), // checkStarted looks at it
		Terminal: !stdio.HasFifos(filepath.Join(s.dir, api.StreamDir), id),
	}
	return writeJSON(s.recordPath(id), r)
}

// adoptOrReport is adoptOrRebuild; a container of which nothing can be read is nil.
func (s *Supervisor) adoptOrReport(id string, h *handover) *container {
	c, err := s.adoptOrRebuild(s.recordPath(id), h)
	if err != nil {
		s.log.Error("a container is left alone: neither its record nor the state of its runtime says what it is", "container", id, "error", err)
	}
	return c
}

// adoptOrRebuild is adoptRecord; where that fails the record is made anew. The error
// says that nothing of it can be read.
func (s *Supervisor) adoptOrRebuild(path string, h *handover) (*container, error) {
	c, err := s.adoptRecord(path, h)
	if err == nil {
		return c, nil
	}
	if unreadable := syscall.Errno(0); errors.As(err, &unreadable) {
		s.log.Error("the record of a container cannot be read", "record", path, "error", err)
	} else {
		s.quarantine(path, err)
	}
	if rebuildErr := s.rebuild(recordedID(path)); rebuildErr != nil {
		return nil, errors.Join(err, rebuildErr)
	}
	if c, err = s.adoptRecord(path, h); err == nil {
		s.log.Error("a container is adopted without its record", "container", c.record.ID, "logged", c.record.LogPath != "")
	}
	return c, err
}

// removeUnreadable removes what is left of a container which is left alone because
// its record cannot be used, and which the daemon deletes: its cgroups are found by
// their names. Which shim it has another container may say, as that of its pod.
func (s *Supervisor) removeUnreadable(id string) error {
	bundles, _ := filepath.Glob(filepath.Join(s.dir, tasksDir, "*", "bundles", "*")) // a good pattern
	for _, bundle := range bundles {
		if program := runtime.TaskProgram(bundle); program != nil {
			s.runtimeOf(record{Runtime: program, Task: true}) // is known from now on
		}
	}
	var err error
	for _, r := range append(s.otherRuntimes(), s.builtin) {
		loaded, loadErr := r.Load(id)
		switch {
		case loadErr == nil:
			err = errors.Join(err, loaded.Delete())
		case r == s.builtin || !errdefs.IsNotFound(loadErr):
			err = errors.Join(err, r.Discard(id))
		}
	}
	return errors.Join(err, s.removeLeft(id), stdio.RemoveFifos(filepath.Join(s.dir, api.StreamDir), id), os.RemoveAll(s.exitPath(id)), s.removeRecord(id))
}

// otherRuntimes are those, besides libcontainer, that have containers or had any.
func (s *Supervisor) otherRuntimes() []runtime.Runtime {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.programs))
}

// removeLeft removes the directories of a container whose runtime is not known.
func (s *Supervisor) removeLeft(id string) (err error) {
	for _, dir := range []string{commandsDir, tasksDir} {
		for _, what := range []string{"bundles", "states"} {
			found, _ := filepath.Glob(filepath.Join(s.dir, dir, "*", what, id)) // a good pattern
			for _, path := range found {
				err = errors.Join(err, os.RemoveAll(path))
			}
		}
	}
	return err
}

// recordedID is the id of the container that a record is of.
func recordedID(path string) string { return strings.TrimSuffix(filepath.Base(path), ".json") }
