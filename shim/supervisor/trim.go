package supervisor

import (
	"context"
	"runtime"
	"runtime/debug"
	"time"

	"github.com/minicri/minicri/internal/filepages"
	"github.com/minicri/minicri/internal/idlethreads"
)

// trimEvery is how often an idle supervisor looks whether it holds memory that it
// does not need: with supervisor = "pod" each pod has one.
const trimEvery = 2 * time.Second

// spareThreads are kept for the next calls.
const spareThreads = 8

// trimMemory gives memory and threads back to the kernel after something has been done.
func trimMemory(ctx context.Context) {
	debug.SetGCPercent(50)
	pages := filepages.Find()
	var stats runtime.MemStats
	var seen uint64
	busy := false
	for tick := time.Tick(trimEvery); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick:
		}
		idlethreads.End(spareThreads)
		runtime.ReadMemStats(&stats)
		// Once more when nothing has happened since: what was in use at the last look
		// is garbage now, and without allocations no collection comes by itself.
		again := busy
		if busy = stats.TotalAlloc-seen > 128<<10; busy || again {
			// Alone: pages that other processors have set aside for what they allocate
			// next are not returned, and after a flood of output they are megabytes.
			processors := runtime.GOMAXPROCS(1)
			runtime.GC() // the next one, of FreeOSMemory, frees what pools held at this one
			debug.FreeOSMemory()
			runtime.GOMAXPROCS(processors)
			runtime.ReadMemStats(&stats)
			seen = stats.TotalAlloc
			pages.Release()
		}
	}
}
