package image

import (
	"sync"
	"time"
)

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
