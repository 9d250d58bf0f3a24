package serve

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/runtime"
)

// reserve makes a container known by its id.
func (s *Supervisor) reserve(c *container) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.containers[c.record.ID] != nil {
		return fmt.Errorf("create container %s: %w", c.record.ID, errdefs.ErrAlreadyExists)
	}
	s.containers[c.record.ID] = c
	return nil
}

// kill signals a container. SIGKILL ends a creation that is under way.
func (s *Supervisor) kill(id string, sig syscall.Signal, all bool) error {
	if c := s.get(id); c != nil && !isClosed(c.created) && sig == syscall.SIGKILL {
		c.abandon()
		return nil
	}
	c, err := s.find(id)
	if err != nil {
		return err
	}
	return c.kill(sig, all)
}

// end kills a container, also one that is being made, and waits until it has
// ended.
func (s *Supervisor) end(id string) error {
	if c := s.get(id); c != nil && !isClosed(c.created) {
		c.abandon()
		select {
		case <-c.created:
		case <-time.After(killTimeout):
		}
	}
	c, err := s.find(id)
	if err != nil {
		return err
	}
	return c.end()
}

func isClosed(c chan struct{}) bool {
	select {
	case <-c:
		return true
	default:
		return false
	}
}

func (s *Supervisor) forget(id string) {
	s.mu.Lock()
	delete(s.containers, id)
	s.mu.Unlock()
}

// find returns a container that is made, for a call to be done with it: its end is seen
// from then on. One that is being made, which a hook can make long, has nothing yet that
// could be used.
func (s *Supervisor) find(id string) (*container, error) {
	switch c := s.get(id); {
	case c == nil:
		return nil, fmt.Errorf("container %s: %w", id, errdefs.ErrNotFound)
	case !isClosed(c.created):
		return nil, fmt.Errorf("container %s is being created: %w", id, errdefs.ErrFailedPrecondition)
	default:
		c.watchAdopted()
		return c, nil
	}
}

func (s *Supervisor) get(id string) *container {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.containers[id]
}

func (s *Supervisor) all() []*container {
	s.mu.Lock()
	defer s.mu.Unlock()
	return slices.Collect(maps.Values(s.containers))
}

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
	return filepath.Join(s.dir, api.RecordDir, id+".json")
}

// recorded are the ids of containers with a record.
func (s *Supervisor) recorded() ([]string, error) {
	entries, err := os.ReadDir(filepath.Join(s.dir, api.RecordDir))
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
