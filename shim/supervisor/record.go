package supervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/minicri/minicri/shim/api"
)

// record is what DIR/records/ID.json holds: what is needed to adopt a
// container from a supervisor that died.
type record struct {
	Version   int               `json:"version"`
	ID        string            `json:"id"`
	PID       int               `json:"pid"`
	StartTime uint64            `json:"start_time"` // clock ticks since boot, guards against a reused pid
	LogPath   string            `json:"log_path"`
	Terminal  bool              `json:"terminal"`
	Bare      bool              `json:"bare,omitempty"` // no streams, and its exit is not asked for
	Cgroups   map[string]string `json:"cgroups"`        // libcontainer's GetPaths: by controller, "" on v2
	CreatedAt int64             `json:"created_at"`
	StartedAt int64             `json:"started_at"`
	Runtime   []string          `json:"runtime,omitempty"` // program and flags of an OCI runtime, none for libcontainer
	Task      bool              `json:"task,omitempty"`    // Runtime is a shim of containerd's
	Pause     string            `json:"pause,omitempty"`   // id of the pod's pause; none for itself, and in records of before
}

const recordVersion = 1

// writeJSON replaces a file as a whole: a reader sees the old or the new.
func writeJSON(path string, value any) error {
	content, err := json.Marshal(value)
	if err != nil {
		return err
	}
	temporary := path + ".new"
	if err := os.WriteFile(temporary, content, 0o600); err != nil {
		return err
	}
	return os.Rename(temporary, path)
}

func readJSON(path string, value any) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return json.Unmarshal(content, value)
}

func (s *Supervisor) recordPath(id string) string {
	return filepath.Join(s.dir, "records", id+".json")
}

// recorded are the ids of containers with a record, also of those whose record is
// quarantined.
func (s *Supervisor) recorded() ([]string, error) { return recordedIn(s.dir) }

func recordedIn(dir string) ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(dir, "records"))
	if err != nil {
		return nil, fmt.Errorf("list the records of containers: %w", err)
	}
	var ids []string
	for _, entry := range entries {
		id, kind, _ := strings.Cut(entry.Name(), ".") // ids have no dot
		if (kind == "json" || kind == "bad") && !slices.Contains(ids, id) {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// hasRecord reports whether a container has a record, or may have one.
func (s *Supervisor) hasRecord(id string) bool {
	record := s.recordPath(id)
	for _, path := range []string{record, quarantined(record)} {
		if _, err := os.Lstat(path); !errors.Is(err, os.ErrNotExist) {
			return true
		}
	}
	return false
}

// removeUnused removes the files of records that count for nothing: writes that were
// cut off, and copies that a build which knows none has left behind.
func (s *Supervisor) removeUnused() error {
	dir := filepath.Join(s.dir, "records")
	entries, err := os.ReadDir(dir)
	for _, entry := range entries {
		id, kind, _ := strings.Cut(entry.Name(), ".")
		if strings.HasSuffix(kind, ".new") || kind == "copy" && !s.hasRecord(id) {
			err = errors.Join(err, os.Remove(filepath.Join(dir, entry.Name())))
		}
	}
	return err
}

// removeRecord removes the record of a container, the one that counts last.
func (s *Supervisor) removeRecord(id string) error {
	record := s.recordPath(id)
	return errors.Join(os.RemoveAll(copied(record)), os.RemoveAll(quarantined(record)), os.RemoveAll(record))
}

func (s *Supervisor) exitPath(id string) string {
	return filepath.Join(s.dir, api.ExitDir, id+".json")
}
