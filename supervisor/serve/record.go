package serve

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/runtime"
)

// record is what DIR/records/ID.json holds: what is needed to adopt a container from a
// supervisor that died. It is written before the container is made, without a pid, and
// once more when it is.
type record struct {
	runtime.Facts
	Version   int    `json:"version"`
	PID       int    `json:"pid"`        // 0: its creation was cut off
	StartTime uint64 `json:"start_time"` // clock ticks since boot, guards against a reused pid
	LogPath   string `json:"log_path"`
	Terminal  bool   `json:"terminal"`
	Bare      bool   `json:"bare,omitempty"` // no streams, and its exit is not asked for
	CreatedAt int64  `json:"created_at"`
	StartedAt int64  `json:"started_at"`
}

// recordVersion is the newest that this build can read.
const recordVersion = api.RecordVersion

const recordsDir = "records"

// writeJSON replaces a file as a whole: a reader sees the old or the new.
func writeJSON(path string, value any) error {
	content, err := json.Marshal(value)
	if err != nil {
		return err
	}
	temporary := path + ".new"
	err = os.WriteFile(temporary, content, 0o600)
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(temporary)) // a disk that is full holds half of it
	}
	return nil
}

func readJSON(path string, value any) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	return json.Unmarshal(content, value)
}

func (s *Supervisor) recordPath(id string) string {
	return filepath.Join(s.dir, recordsDir, id+".json")
}

// recorded are the ids of containers with a record.
func (s *Supervisor) recorded() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, recordsDir))
	if err != nil {
		return nil, fmt.Errorf("list the records of containers: %w", err)
	}
	var ids []string
	for _, entry := range entries {
		if id, isRecord := strings.CutSuffix(entry.Name(), ".json"); isRecord {
			ids = append(ids, id)
		}
	}
	return ids, nil
}

// hasRecord reports whether a container has a record, or may have one.
func (s *Supervisor) hasRecord(id string) bool {
	_, err := os.Lstat(s.recordPath(id))
	return !errors.Is(err, os.ErrNotExist)
}

func (s *Supervisor) removeRecord(id string) error { return os.RemoveAll(s.recordPath(id)) }

func (s *Supervisor) exitPath(id string) string {
	return filepath.Join(s.dir, api.ExitDir, id+".json")
}
