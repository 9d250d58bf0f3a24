package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/minicri/minicri/shim/api"
	"github.com/minicri/minicri/shim/stdio"
)

// quarantined is where a record goes that cannot be used, until its container is
// deleted.
func quarantined(record string) string { return strings.TrimSuffix(record, ".json") + ".bad" }

func (s *Supervisor) quarantine(path string, cause error) {
	s.log.Error("a container cannot be adopted, its record is quarantined", "record", path, "error", cause)
	_ = os.Rename(path, quarantined(path))
}

// rebuild makes the record of a container anew, one that cannot be used is no reason
// to end it: libcontainer knows its process and its cgroups, and it has fifos unless
// it has a terminal, or no output at all. Only where its log is is lost.
func (s *Supervisor) rebuild(id string) error {
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

// adoptOrRebuild is adoptRecord; where that fails the record is made anew.
func (s *Supervisor) adoptOrRebuild(path string, h *handover) (*container, error) {
	c, err := s.adoptRecord(path, h.Containers)
	if err == nil {
		return c, nil
	}
	s.quarantine(path, err)
	if rebuildErr := s.rebuild(recordedID(path)); rebuildErr != nil {
		return nil, errors.Join(err, rebuildErr)
	}
	if c, err = s.adoptRecord(path, h.Containers); err == nil {
		s.log.Error("a container is adopted without its record: its output is not logged from now on", "container", c.record.ID)
	}
	return c, err
}

// recordedID is the id of the container that a record is of.
func recordedID(path string) string { return strings.TrimSuffix(filepath.Base(path), ".json") }
