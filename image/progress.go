package image

import (
	"io"
	"sync"
	"time"
)

// Stage says what is being done with a blob.
type Stage string

const (
	// StageDownload: Done of Total bytes have come from the registry.
	StageDownload Stage = "downloading"
	// StageUnpack: Done of Total compressed bytes have been unpacked.
	StageUnpack Stage = "unpacking"
	// StageDone: the blob is on the node; Done equals Total.
	StageDone Stage = "done"
)

// Progress is how far a pull has got with one blob. Reports of one blob are in order.
type Progress struct {
	Digest string // sha256:<hex>
	Stage  Stage
	Done   int64 // bytes
	Total  int64 // bytes
}

// reportEvery bounds how often one stage of one blob is reported.
const reportEvery = 100 * time.Millisecond

// watchers are the callers that follow one pull.
type watchers struct {
	mu   sync.Mutex // guards what follows; held while they are called, so reports stay in order
	next int
	all  map[int]func(Progress)
	last map[string]reported // by digest
}

// reported is the last report of a blob.
type reported struct {
	stage Stage
	time  time.Time
}

// add returns the function that removes the watcher; after it has returned, the
// watcher is not called any more.
func (w *watchers) add(progress func(Progress)) (forget func()) {
	if progress == nil {
		return func() {}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all == nil {
		w.all, w.last = map[int]func(Progress){}, map[string]reported{}
	}
	w.next++
	key := w.next
	w.all[key] = progress
	return func() {
		w.mu.Lock()
		defer w.mu.Unlock()
		delete(w.all, key)
	}
}

func (w *watchers) report(p Progress) {
	w.mu.Lock()
	defer w.mu.Unlock()
	if len(w.all) == 0 || !w.isDue(p) {
		return
	}
	for _, report := range w.all {
		report(p)
	}
}

func (w *watchers) isDue(p Progress) bool {
	last, now := w.last[p.Digest], time.Now()
	again := last.stage == p.Stage
	if again && (p.Stage == StageDone || p.Done < p.Total && now.Sub(last.time) < reportEvery) {
		return false
	}
	w.last[p.Digest] = reported{stage: p.Stage, time: now}
	return true
}

// countedReader reports what is read: where it is, and how much came just now.
type countedReader struct {
	io.Reader
	at     int64
	report func(at int64, n int)
}

func (r *countedReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	if n > 0 {
		r.at += int64(n)
		r.report(r.at, n)
	}
	return n, err
}

const (
	// waitRate is the slowest download, in bytes per second over waitWindow, that
	// other pulls of the same blob wait for.
	waitRate = 64 << 10
	// waitWindow is how long a download is measured before it is called slow.
	waitWindow = 10 * time.Second
)

// meter measures the downloads of one pull for other pulls that wait for it.
type meter struct {
	window time.Duration

	mu        sync.Mutex // guards what follows
	downloads map[*download]struct{}
}

// download is a blob under way.
type download struct {
	since time.Time // when the window began
	bytes int64     // in the window
	slow  bool      // whether the last whole window was
}

func newMeter(window time.Duration) *meter {
	return &meter{window: window, downloads: map[*download]struct{}{}}
}

// look is how often a waiting pull looks at the one that it waits for.
func (m *meter) look() time.Duration { return m.window / 10 }

// start measures a download until end is called. add takes what has come.
func (m *meter) start() (add func(n int), end func()) {
	d := &download{since: time.Now()}
	m.mu.Lock()
	defer m.mu.Unlock()
	m.downloads[d] = struct{}{}
	return func(n int) { m.add(d, n) }, func() { m.end(d) }
}

func (m *meter) add(d *download, n int) {
	m.mu.Lock()
	defer m.mu.Unlock()
	d.bytes += int64(n)
}

func (m *meter) end(d *download) {
	m.mu.Lock()
	defer m.mu.Unlock()
	delete(m.downloads, d)
}

// slow reports whether one of the pull's downloads is below waitRate. It is
// asked again and again by the pull that waits.
func (m *meter) slow() bool {
	m.mu.Lock()
	defer m.mu.Unlock()
	slow := false
	for d := range m.downloads {
		if took := time.Since(d.since); took >= m.window {
			d.slow = float64(d.bytes) < waitRate*took.Seconds()
			d.since, d.bytes = time.Now(), 0
		}
		slow = slow || d.slow
	}
	return slow
}
