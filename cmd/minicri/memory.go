package main

import (
	"context"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"

	"github.com/minicri/minicri/internal/filepages"
	"github.com/minicri/minicri/internal/idlethreads"
)

const (
	// memoryLook is how often the daemon looks whether it holds memory that it does
	// not need: Go's own collector returns it after minutes.
	memoryLook = 4 * time.Second
	// memoryRise is how much more than last time makes it worth the time to return
	// memory; of garbage, on top of a quarter.
	memoryRise = 1 << 20
	// mostPages of the program stay mapped, in bytes: with each page that is touched
	// the kernel maps those around it, and the calls of a kubelet bring most of them back.
	mostPages = 8 << 20
	// spareThreads are kept for the next calls.
	spareThreads = 16
)

// returnMemory returns to the node the garbage that the start and bursts of calls
// have left, their threads, and the pages of the program that they have touched, until
// ctx ends.
func returnMemory(ctx context.Context) {
	pages := filepages.Find()
	garbage := heldMemory()
	risen, started := false, true
	for tick := time.Tick(memoryLook); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick:
		}
		idlethreads.End(spareThreads)
		// Once more after it has risen: what was in use at the last look is garbage
		// now, and without work no collection comes by itself.
		again := risen || started
		started = false
		if risen = heldMemory() > garbage+garbage/4+memoryRise; risen || again {
			runtime.GC() // the next one, of FreeOSMemory, frees what pools held at this one
			debug.FreeOSMemory()
			garbage = heldMemory()
		}
		if risen || again || pages.Resident() > mostPages {
			pages.Release()
		}
	}
}

// heldMemory is what the Go runtime holds, in bytes.
func heldMemory() uint64 {
	samples := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(samples)
	return samples[0].Value.Uint64() - samples[1].Value.Uint64()
}
