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

// Progress is the news of one blob of a pull. Reports of one blob are in order.
type Progress struct {
	Digest string // sha256:<hex>
	Stage  Stage
	Done   int64 // bytes
	Total  int64 // bytes
}

// reportEvery bounds how often a download reports.
const reportEvery = 100 * time.Millisecond

// watchers are the callers that follow one pull.
type watchers struct {
	mu   sync.Mutex // guards all; held while they are told, so news stay in order
	next int
	all  map[int]func(Progress)
}

// add returns the function that takes the watcher away again; after it returned,
// the watcher is not called any more.
func (w *watchers) add(progress func(Progress)) (forget func()) {
	if progress == nil {
		return func() {}
	}
	w.mu.Lock()
	defer w.mu.Unlock()
	if w.all == nil {
		w.all = map[int]func(Progress){}
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
	for _, tell := range w.all {
		tell(p)
	}
}

// countedBody reports a download as it is read. It passes Seek on, which the
// fetcher needs to resume.
type countedBody struct {
	io.ReadCloser
	at     Progress
	last   time.Time
	report func(Progress)
}

func (b *countedBody) Read(p []byte) (int, error) {
	n, err := b.ReadCloser.Read(p)
	b.at.Done += int64(n)
	if now := time.Now(); n > 0 && now.Sub(b.last) >= reportEvery {
		b.last = now
		b.report(b.at)
	}
	return n, err
}

func (b *countedBody) Seek(offset int64, whence int) (int64, error) {
	at, err := b.ReadCloser.(io.Seeker).Seek(offset, whence)
	if err == nil {
		b.at.Done = at
	}
	return at, err
}
