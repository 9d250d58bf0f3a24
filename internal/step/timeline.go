package step

import (
	"context"
	"slices"
	"sync"
	"time"
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

	underWay bool
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
	row := &Row{Kind: name.Kind(), Step: name.Own(), Start: time.Now(), underWay: true}
	t.mu.Lock()
	defer t.mu.Unlock()
	t.add(row)
	return row
}

func (t *Timeline) end(row *Row, err error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	row.Took, row.underWay = time.Since(row.Start), false
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

// Rows are the rows until now, by beginning. A step that is under way has taken the time until now.
func (t *Timeline) Rows() []Row {
	t.mu.Lock()
	defer t.mu.Unlock()
	rows := make([]Row, 0, len(t.rows))
	for _, row := range t.rows {
		shown := *row
		if shown.underWay {
			shown.Took, shown.underWay = time.Since(row.Start), false
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
		if row.underWay {
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
