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
	"strconv"
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
	mostLives  = 1000
	mostFailed = 750
	mostBytes  = 8 << 10
	// mostLifeError is the longest error of a life, in bytes.
	mostLifeError = 1 << 10
	// mostNetwork is the largest configuration of a network that a life has.
	mostNetwork = 1536
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
	if err := os.MkdirAll(directory, 0o700); err != nil {
		return nil, fmt.Errorf("make the directory for timelines: %w", err)
	}
	return FindLives(directory), nil
}

// FindLives is OpenLives for those that only read: the directory need not be there.
func FindLives(directory string) *Lives { return &Lives{directory: directory} }

const (
	fine   = "ok"
	failed = "failed"
)

func (l Life) file() string {
	outcome := fine
	if l.Error != "" {
		outcome = failed
	}
	parts := []string{fmt.Sprintf("%019d", l.End.UnixNano()), outcome, l.Kind, l.ID}
	return strings.Join(parts, "-") + ".json"
}

// RefusedID is the id of what was refused before it had one: the same for every
// try, of which the last one is kept.
func RefusedID(kind, name string) string {
	sum := sha256.Sum256([]byte(kind + " " + name))
	return hex.EncodeToString(sum[:])
}

// idOf reads the id from a file's name; ok is false for a foreign file.
func idOf(name string) (id string, ok bool) {
	parts := strings.Split(strings.TrimSuffix(name, ".json"), "-")
	if len(parts) < 4 || !strings.HasSuffix(name, ".json") {
		return "", false
	}
	_, err := strconv.ParseInt(parts[0], 10, 64)
	return parts[3], err == nil
}

// Keep writes a life down, in the place of an earlier one of the same id, and
// removes the oldest ones beyond the limits. It is not worth an fsync. A nil Lives
// keeps nothing.
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
	names, foreign, err := l.list()
	if err != nil {
		return err
	}
	name := life.file()
	if err := state.WriteFile(filepath.Join(l.directory, name), data, false); err != nil {
		return fmt.Errorf("keep the timeline of %s: %w", life.ID, err)
	}
	gone := slices.DeleteFunc(foreign, func(name string) bool { return !state.IsTemporary(name) })
	names = slices.DeleteFunc(names, func(other string) bool {
		earlier := has(other, life.ID)
		if earlier && other != name {
			gone = append(gone, other)
		}
		return earlier
	})
	for names = append(names, name); len(names) > mostLives; {
		i := oldest(names)
		gone = append(gone, names[i])
		names = slices.Delete(names, i, i+1)
	}
	for _, name := range gone {
		err = errors.Join(err, ignoreNotExist(os.Remove(filepath.Join(l.directory, name))))
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
	l.Error = l.Error[:min(len(l.Error), mostLifeError)]
	if len(l.Network) > mostNetwork {
		l.Network = nil
	}
	for {
		data, err := json.Marshal(l)
		if err != nil || len(data) < mostBytes || len(l.Rows) == 0 {
			return data, err
		}
		// As many as are too many when all have one size, at least one.
		most := min(len(l.Rows)*mostBytes/len(data), len(l.Rows)-1)
		l.Rows = slices.Concat(l.Rows[:(most+1)/2], l.Rows[len(l.Rows)-most/2:])
	}
}

// has reports whether a file is of that id; most are not, which is found without
// taking their names apart.
func has(name, id string) bool {
	if !strings.Contains(name, id) {
		return false
	}
	its, ok := idOf(name)
	return ok && its == id
}

// oldest is which one goes first: the oldest that did not fail, unless most did.
func oldest(names []string) int {
	didFail := func(name string) bool {
		_, after, _ := strings.Cut(name, "-")
		return strings.HasPrefix(after, failed+"-")
	}
	count := 0
	for _, name := range names {
		if didFail(name) {
			count++
		}
	}
	wanted := count > mostFailed
	return max(0, slices.IndexFunc(names, func(name string) bool { return didFail(name) == wanted }))
}

// list has the names of the files that are lives, the oldest first, and those of others.
func (l *Lives) list() (names, foreign []string, err error) {
	entries, err := os.ReadDir(l.directory)
	if err = ignoreNotExist(err); err != nil {
		return nil, nil, fmt.Errorf("list the timelines: %w", err)
	}
	for _, entry := range entries {
		if _, ok := idOf(entry.Name()); ok {
			names = append(names, entry.Name())
		} else {
			foreign = append(foreign, entry.Name())
		}
	}
	return names, foreign, nil
}

// List returns the lives that are kept, the newest first. A file that cannot be
// read is left out.
func (l *Lives) List() ([]Life, error) { return l.read(func(string) bool { return true }) }

// Get returns those whose id begins so, the newest first.
func (l *Lives) Get(id string) ([]Life, error) {
	return l.read(func(its string) bool { return strings.HasPrefix(its, id) })
}

func (l *Lives) read(match func(id string) bool) ([]Life, error) {
	names, _, err := l.list()
	if err != nil {
		return nil, err
	}
	slices.Reverse(names)
	var lives []Life
	for _, name := range names {
		if id, _ := idOf(name); !match(id) {
			continue
		}
		var life Life
		data, err := state.ReadFile(filepath.Join(l.directory, name))
		if err == nil && json.Unmarshal(data, &life) == nil {
			lives = append(lives, life)
		}
	}
	return lives, nil
}

func ignoreNotExist(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}
