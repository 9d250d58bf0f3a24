package stats

import (
	"sync"
	"time"
)

// shortestWindow is the least time that a rate is taken over. Who asks again
// sooner gets the same rate: two that ask in turn must not leave each other
// with the few milliseconds between them.
const shortestWindow = time.Second

// sampleAge is how long a sample without a request is kept. It is far above
// the periods in which a node is asked for all its stats.
const sampleAge = 5 * time.Minute

// rates keeps one sample for each cgroup.
type rates struct {
	mu      sync.Mutex // guards samples and pruned
	samples map[string]sample
	pruned  time.Time
}

// sample is the cpu time at a moment, and the rate over the window that ended
// there, 0 and unknown if it was the first.
type sample struct {
	cpu
	nanoCores uint64
	known     bool
}

func newRates() *rates { return &rates{samples: make(map[string]sample)} }

// rate is how many nanoseconds of cpu time the cgroup uses each second, since
// the sample before; unknown if this is the first one.
func (r *rates) rate(path string, now cpu) (nanoCores uint64, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.prune(now.at)
	last, found := r.samples[path]
	window := now.at.Sub(last.at)
	if found && window < shortestWindow {
		return last.nanoCores, last.known
	}
	next := sample{cpu: now}
	// A cgroup that was made again under its old name counts from zero.
	if found && now.total >= last.total {
		next.nanoCores, next.known = perSecond(now.total-last.total, window), true
	}
	r.samples[path] = next
	return next.nanoCores, next.known
}

func perSecond(used, window time.Duration) uint64 {
	return uint64(float64(used) / window.Seconds())
}

// prune forgets the samples of cgroups that have gone; mu is held.
func (r *rates) prune(now time.Time) {
	if now.Sub(r.pruned) < sampleAge {
		return
	}
	r.pruned = now
	for path, last := range r.samples {
		if now.Sub(last.at) >= sampleAge {
			delete(r.samples, path)
		}
	}
}
