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
	// Kind is "pod" or "container", or "image" for a pull that failed and was
	// for no pod that is there.
	Kind string `json:"kind"`
	ID   string `json:"id"`
	// Pod is the id of a container's pod, "" for a pod.
	Pod string `json:"pod,omitempty"`
	// Name is what people call it: namespace/name, and of a container its own.
	Name    string `json:"name"`
	Attempt uint32 `json:"attempt,omitempty"`
	// End is when it was removed, or failed.
	End time.Time `json:"end"`
	// Error is why it could not be made, "" if it was made and then removed.
	Error string `json:"error,omitempty"`
	Rows  []Row  `json:"rows"`
	// Network is the configuration of the pod's network, "" if it is too large.
	Network json.RawMessage `json:"network,omitempty"`
}

// Lives are kept up to these numbers; a file takes at most two blocks of the
// disk, so all of them at most 8 MiB.
const (
	maxLives  = 1000
	maxFailed = 750
	maxBytes  = 8 << 10
	// maxLifeError is the longest error of a life, maxNetwork its largest configuration
	// of a network, in bytes.
	maxLifeError = 1 << 10
	maxNetwork   = 1536
)

// Lives keeps the last lives, one file each, those that failed longest: a file's
// name says when it ended, whether it failed, the kind and the id.
type Lives struct {
	directory string

	mu sync.Mutex // held while one is written and others are removed
}

// OpenLives keeps lives in a directory, which it makes. A directory that another
// process keeps lives in may be opened for List and Get.
func OpenLives(directory string) (*Lives, error) {
	if err := errors.Join(os.MkdirAll(directory, 0o700), state.ClearTemporary(directory)); err != nil {
		return nil, fmt.Errorf("make the directory for timelines: %w", err)
	}
	return FindLives(directory), nil
}

// FindLives is OpenLives for those that only read: the directory need not be there.
func FindLives(directory string) *Lives { return &Lives{directory: directory} }

// RefusedID is the id of what was refused before it had one: the same for every
// try, of which the last one is kept.
func RefusedID(kind, name string) string {
	sum := sha256.Sum256([]byte(kind + " " + name))
	return hex.EncodeToString(sum[:])
}

// idOf is the id in a file's name, "" for another file.
func idOf(name string) string {
	parts := strings.SplitN(strings.TrimSuffix(name, ".json"), "-", 4)
	if len(parts) < 4 || !strings.HasSuffix(name, ".json") {
		return ""
	}
	return parts[3]
}

func didFail(name string) bool { return strings.Contains(name, "-failed-") }

// Keep writes a life down, in the place of an earlier one of the same id, and removes
// the oldest one beyond the limits that did not fail, unless most did. It is not worth an
// fsync. A nil Lives keeps nothing.
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
	outcome := "ok"
	if life.Error != "" {
		outcome = "failed"
	}
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

// Append adds a row to the last life of an id; where there is none it does nothing.
func (l *Lives) Append(id string, row Row) error {
	lives, err := l.Get(id)
	if err != nil || len(lives) == 0 {
		return err
	}
	lives[0].Rows = append(lives[0].Rows, row)
	return l.Keep(lives[0])
}

// encode leaves out rows from the middle until the life fits its file.
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
		// As many as are too many when all have one size, at least one.
		most := min(len(l.Rows)*maxBytes/len(data), len(l.Rows)-1)
		l.Rows = slices.Concat(l.Rows[:(most+1)/2], l.Rows[len(l.Rows)-most/2:])
	}
}

// list has the names of the files that are lives, the oldest first.
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

// List returns the lives that are kept, the newest first. A file that cannot be
// read is left out.
func (l *Lives) List() ([]Life, error) { return l.Get("") }

// Get returns those whose id begins so, the newest first.
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
