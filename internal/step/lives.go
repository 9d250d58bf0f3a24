package step

import (
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/minicri/minicri/internal/state"
)

// Life is the timeline of a pod or container that is gone, or could not be made.
type Life struct {
	Kind    string    `json:"kind"` // "pod", "container", or "image" for a failed pull that was for no pod
	ID      string    `json:"id"`
	Pod     string    `json:"pod,omitempty"` // the id of a container's pod
	Name    string    `json:"name"`          // namespace/name, and a container's own
	Attempt uint32    `json:"attempt,omitempty"`
	End     time.Time `json:"end"`             // when it was removed, or failed
	Error   string    `json:"error,omitempty"` // why it could not be made
	Rows    []Row     `json:"rows"`
	// Network is the configuration of the pod's network, "" if it is too large.
	Network json.RawMessage `json:"network,omitempty"`
}

// A file takes at most two blocks of the disk, so all lives together at most 8 MiB.
const (
	maxLives     = 1000
	maxFailed    = 750
	maxBytes     = 8 << 10
	maxLifeError = 1 << 10
	maxNetwork   = 1536
)

// Lives keeps the last lives, failed ones longest, in files named by end, outcome, kind and id.
type Lives struct {
	directory string

	mu sync.Mutex // held while one is written and others are removed
}

// OpenLives keeps lives in a directory, which it makes.
func OpenLives(directory string) (*Lives, error) {
	if err := errors.Join(os.MkdirAll(directory, 0o700), state.ClearTemporary(directory)); err != nil {
		return nil, fmt.Errorf("make the directory for timelines: %w", err)
	}
	return FindLives(directory), nil
}

// FindLives is OpenLives for those that only read. The directory may be missing.
func FindLives(directory string) *Lives { return &Lives{directory: directory} }

// RefusedID is the id of what was refused before it had one, the same for each try.
func RefusedID(kind, name string) string {
	sum := sha256.Sum256([]byte(kind + " " + name))
	return hex.EncodeToString(sum[:])
}

func idOf(name string) string {
	parts := strings.SplitN(strings.TrimSuffix(name, ".json"), "-", 4)
	if len(parts) < 4 || !strings.HasSuffix(name, ".json") {
		return ""
	}
	return parts[3]
}

func didFail(name string) bool { return strings.Contains(name, "-failed-") }

// Keep replaces an earlier life of the same id. Beyond the limit it removes the oldest that did not fail, or
// the oldest failed one if most did. It does not fsync. A nil Lives keeps nothing.
func (l *Lives) Keep(life Life) error {
	if l == nil {
		return nil
	}
	data, err := life.encode()
	if err != nil {
		return fmt.Errorf("encode the timeline of %s: %w", life.ID, err)
	}
	l.mu.Lock()
	defer l.mu.Unlock()
	names, err := l.list()
	if err != nil {
		return err
	}
	outcome := map[bool]string{true: "ok", false: "failed"}[life.Error == ""]
	name := fmt.Sprintf("%019d-%s-%s-%s.json", life.End.UnixNano(), outcome, life.Kind, life.ID)
	if err := state.WriteFile(filepath.Join(l.directory, name), data, false); err != nil {
		return fmt.Errorf("keep the timeline of %s: %w", life.ID, err)
	}
	remove := func(name string) {
		if removeErr := os.Remove(filepath.Join(l.directory, name)); !errors.Is(removeErr, fs.ErrNotExist) {
			err = errors.Join(err, removeErr)
		}
	}
	names = append(slices.DeleteFunc(names, func(other string) bool {
		earlier := idOf(other) == life.ID
		if earlier && other != name {
			remove(other)
		}
		return earlier
	}), name)
	for len(names) > maxLives {
		failed := 0
		for _, name := range names {
			if didFail(name) {
				failed++
			}
		}
		i := max(0, slices.IndexFunc(names, func(name string) bool { return didFail(name) == (failed > maxFailed) }))
		remove(names[i])
		names = slices.Delete(names, i, i+1)
	}
	return err
}

// Append adds a row to the last life of an id, if there is one.
func (l *Lives) Append(id string, row Row) error {
	lives, err := l.Get(id)
	if err != nil || len(lives) == 0 {
		return err
	}
	lives[0].Rows = append(lives[0].Rows, row)
	return l.Keep(lives[0])
}

// encode removes rows from the middle until the life fits its file.
func (l Life) encode() ([]byte, error) {
	l.Error = l.Error[:min(len(l.Error), maxLifeError)]
	if len(l.Network) > maxNetwork {
		l.Network = nil
	}
	for {
		data, err := json.Marshal(l)
		if err != nil || len(data) < maxBytes || len(l.Rows) == 0 {
			return data, err
		}
		// How many fit if all have the same size; at least one goes.
		most := min(len(l.Rows)*maxBytes/len(data), len(l.Rows)-1)
		l.Rows = slices.Concat(l.Rows[:(most+1)/2], l.Rows[len(l.Rows)-most/2:])
	}
}

// list returns the files of lives, the oldest first.
func (l *Lives) list() (names []string, err error) {
	entries, err := os.ReadDir(l.directory)
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		return nil, fmt.Errorf("list the timelines: %w", err)
	}
	for _, entry := range entries {
		if idOf(entry.Name()) != "" {
			names = append(names, entry.Name())
		}
	}
	return names, nil
}

// List returns all lives, the newest first, without files that cannot be read.
func (l *Lives) List() ([]Life, error) { return l.Get("") }

// Get returns the lives whose id begins so, the newest first.
func (l *Lives) Get(id string) (lives []Life, err error) {
	names, err := l.list()
	for _, name := range slices.Backward(names) {
		if !strings.HasPrefix(idOf(name), id) {
			continue
		}
		var life Life
		data, err := state.ReadFile(filepath.Join(l.directory, name))
		if err == nil && json.Unmarshal(data, &life) == nil {
			lives = append(lives, life)
		}
	}
	return lives, err
}
