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

// countedBody reports a download as it is read.
type countedBody struct {
	io.Reader
	at     Progress
	report func(at Progress, n int)
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.Reader.Read(p)
	b.at.Done += int64(n)
	if n > 0 {
		b.report(b.at, n)
	}
	return n, err
}
