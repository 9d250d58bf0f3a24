package supervisor

import (
	"encoding/json"
	"os"
	"path/filepath"

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

func (s *Supervisor) exitPath(id string) string {
	return filepath.Join(s.dir, api.ExitDir, id+".json")
}
