package step

import (
	"context"
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

// Row is one row of a timeline: what was done, when it began, how long it took.
type Row struct {
	// Kind is the step's, "pod" or "container"; "plugin" for a run of a CNI plugin, "image" for a pull, and "exit"
	// for a container's run from start to end.
	Kind string `json:"kind"`
	// Step is the step's own name; the plugin and its verb, "bridge ADD"; or the reference of the image.
	Step  string        `json:"step"`
	Start time.Time     `json:"start"`
	Took  time.Duration `json:"took,omitempty"`
	Error string        `json:"error,omitempty"` // no longer than maxError
	// Parent is what a plugin ran for: a step, "cni add".
	Parent string  `json:"parent,omitempty"`
	Note   string  `json:"note,omitempty"`   // what came of it: "exit code 137, OOMKilled"
	Plugin *Plugin `json:"plugin,omitempty"` // of a plugin's run alone
	// Running is true for a step that has not ended: Took is the time until now. Records on disk do not have it.
	Running bool `json:"running,omitempty"`
}

// Plugin is the result of a run of a CNI plugin. If it was killed before it answered, no later field is known.
type Plugin struct {
	Name    string `json:"name"`
	Verb    string `json:"verb"`
	Killed  bool   `json:"killed,omitempty"`
	Exit    int    `json:"exit"`
	Signal  int    `json:"signal,omitempty"` // that ended it instead
	Code    uint   `json:"code,omitempty"`   // with the next two the CNI error (CNI SPEC, "Error")
	Message string `json:"message,omitempty"`
	Details string `json:"details,omitempty"`
	Stderr  string `json:"stderr,omitempty"` // its end
}

// A timeline is bounded: an object that is stopped in vain for days keeps its first rows and its last ones.
const (
	maxRows   = 48
	maxError  = 512 // bytes
	maxStderr = 256
)

// Timeline collects the rows of one object. It may be used concurrently.
type Timeline struct {
	mu   sync.Mutex
	rows []*Row // in the order of their beginnings
}

// NewTimeline continues after the rows of the past.
func NewTimeline(past []Row) *Timeline {
	t := &Timeline{}
	for _, row := range past {
		t.rows = append(t.rows, &row)
	}
	return t
}

func (t *Timeline) begin(name Name) *Row {
	row := &Row{Kind: name.Kind(), Step: name.Own(), Start: time.Now(), Running: true}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.add(row)
	return row
}

func (t *Timeline) end(row *Row, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	row.Took, row.Running = time.Since(row.Start), false
	if err != nil {
		row.Error = err.Error()
		row.Error = row.Error[:min(len(row.Error), maxError)]
	}
}

// add puts a row where it began. t.mu is held.
func (t *Timeline) add(row *Row) {
	at := len(t.rows)
	for at > 0 && t.rows[at-1].Start.After(row.Start) {
		at--
	}
	t.rows = slices.Insert(t.rows, at, row)
	if len(t.rows) > maxRows {
		t.rows = slices.Delete(t.rows, maxRows/2, maxRows/2+1)
	}
}

// Rows returns the rows for a record, in the order of their beginnings, as if all steps had ended now.
func (t *Timeline) Rows() []Row {
	rows := t.Live()
	for i := range rows {
		rows[i].Running = false
	}
	return rows
}

// Live returns the rows, in the order of their beginnings. A running step has taken the time until now.
func (t *Timeline) Live() []Row {
	t.mu.Lock()
	defer t.mu.Unlock()
	rows := make([]Row, 0, len(t.rows))
	for _, row := range t.rows {
		shown := *row
		if shown.Running {
			shown.Took = time.Since(row.Start)
		}
		rows = append(rows, shown)
	}
	return rows
}

// Stage is the last begun step that is under way, nil if there is none.
func (t *Timeline) Stage() *Row {
	t.mu.Lock()
	defer t.mu.Unlock()
	for _, row := range slices.Backward(t.rows) {
		if row.Running {
			shown := *row
			shown.Took = time.Since(row.Start)
			return &shown
		}
	}
	return nil
}

type parent struct {
	timeline *Timeline
	step     string
}

type parentKey struct{}

// Record adds a row to the timeline of ctx's step, as its child if it has no Parent. It reports whether ctx has one.
func Record(ctx context.Context, row Row) bool {
	of, ok := ctx.Value(parentKey{}).(parent)
	if !ok {
		return false
	}
	if row.Parent == "" {
		row.Parent = of.step
	}
	of.timeline.Add(row)
	return true
}

// Add adds a row of something that has ended.
func (t *Timeline) Add(row Row) {
	row.Error = row.Error[:min(len(row.Error), maxError)]
	if p := row.Plugin; p != nil {
		bounded := *p
		bounded.Message = p.Message[:min(len(p.Message), maxError)]
		bounded.Details = p.Details[:min(len(p.Details), maxError)]
		bounded.Stderr = p.Stderr[max(0, len(p.Stderr)-maxStderr):]
		row.Plugin = &bounded
	}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.add(&row)
}

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
