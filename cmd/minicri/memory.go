package main

import (
	"context"
	"runtime"
	"runtime/debug"
	"runtime/metrics"
	"time"
)

const (
	// memoryLook is how often the daemon looks whether it holds what it does not
	// need: Go's own collector comes back to it after minutes.
	memoryLook = 4 * time.Second
	// memoryRise is how much more than last time makes a collection worth its
	// time, beside a quarter.
	memoryRise = 4 << 20
)

// returnMemory gives back to the node what a burst of calls has taken, until ctx
// ends.
func returnMemory(ctx context.Context) {
	low := heldMemory()
	for tick := time.Tick(memoryLook); ; {
		select {
		case <-ctx.Done():
			return
		case <-tick:
		}
		now := heldMemory()
		if now > low+low/4+memoryRise {
			runtime.GC() // the next one, of FreeOSMemory, frees what pools held at this one
			debug.FreeOSMemory()
			now = heldMemory()
		}
		low = now
	}
}

// heldMemory is what the Go runtime holds, in bytes.
func heldMemory() uint64 {
	samples := []metrics.Sample{{Name: "/memory/classes/total:bytes"}, {Name: "/memory/classes/heap/released:bytes"}}
	metrics.Read(samples)
	return samples[0].Value.Uint64() - samples[1].Value.Uint64()
}
