package client

import (
	"runtime"
	"runtime/debug"
	"slices"
	"sync"
	"time"

	"github.com/minicri/minicri/supervisor/api"
)

const (
	maxCaptured  = 64 << 20        // bytes that all captures hold together
	sureCaptured = 64 << 10        // bytes that one capture keeps in any case: the kubelet takes 10 KiB of a probe's
	muchCaptured = 8 << 20         // bytes after which memory is returned to the node
	returnAfter  = 2 * time.Second // until the answers are sent
)

// Captured bounds what all captures hold. Beyond maxCaptured the largest capture is cut to sureCaptured: a container
// that writes much takes nothing from the commands of others. The zero value is ready for use.
type Captured struct {
	mu    sync.Mutex // guards all fields, and held, Cut and the outputs of the captures
	all   map[*capture]bool
	bytes int
	peak  int          // the largest value of bytes since the last return of memory
	later func(func()) // runs a function after returnAfter; nil except in tests
}

// capture reads the outputs of an exec. Beyond the limits it drops all bytes, so that the process does not wait.
type capture struct {
	ExecResult
	all   *Captured
	limit int
	held  int
	work  sync.WaitGroup
}

// read closes delivered when it has read all.
func (k *capture) read(e *Exec) (delivered chan struct{}) {
	for stream, into := range map[string]*[]byte{api.Stdout: &k.Stdout, api.Stderr: &k.Stderr} {
		k.work.Go(func() { // ends with the output, or when e is closed
			var n int
			var err error
			for buffer := make([]byte, 32<<10); err == nil; k.all.add(k, into, buffer[:n]) {
				n, err = e.Outputs[stream].Read(buffer)
			}
		})
	}
	delivered = make(chan struct{})
	go func() {
		k.work.Wait()
		close(delivered)
	}()
	return delivered
}

// result returns the captured outputs.
func (k *capture) result() ExecResult {
	k.all.mu.Lock()
	defer k.all.mu.Unlock()
	return k.ExecResult
}

// release is for an exec that is closed.
func (k *capture) release() {
	k.work.Wait()
	k.all.release(k)
}

// add keeps a chunk of an output, or drops it and all that follow.
func (a *Captured) add(k *capture, into *[]byte, chunk []byte) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if k.Cut || len(chunk) == 0 {
		return
	}
	if a.all == nil {
		a.all = make(map[*capture]bool)
	}
	a.all[k] = true
	for a.bytes+len(chunk) > maxCaptured && k.held+len(chunk) > sureCaptured && !k.Cut {
		a.cutLargest(k)
	}
	if k.Cut || k.held+len(chunk) > k.limit {
		k.Cut = true
		return
	}
	*into = append(*into, chunk...)
	k.held += len(chunk)
	a.bytes += len(chunk)
	a.peak = max(a.peak, a.bytes)
}

// cutLargest cuts the largest capture; the capture k only ends if none is larger. mu is held.
func (a *Captured) cutLargest(k *capture) {
	largest := k
	for other := range a.all {
		if other.held > largest.held {
			largest = other
		}
	}
	largest.Cut = true
	if largest == k {
		return
	}
	before := largest.held
	for _, output := range []*[]byte{&largest.Stdout, &largest.Stderr} {
		*output = slices.Clone((*output)[:min(len(*output), sureCaptured/2)]) // the rest of the memory is free
	}
	largest.held = len(largest.Stdout) + len(largest.Stderr)
	a.bytes -= before - largest.held
}

// release forgets a capture. After much was captured the memory goes back to the node at once: the daemon allocates so
// little that the next collections come minutes later. Two are needed, as buffers of answers are pooled.
func (a *Captured) release(k *capture) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.bytes -= k.held
	k.held = 0
	delete(a.all, k)
	if a.peak < muchCaptured || a.bytes >= muchCaptured {
		return
	}
	a.peak = a.bytes
	later := a.later
	if later == nil {
		later = func(do func()) { time.AfterFunc(returnAfter, do) }
	}
	later(func() {
		runtime.GC()
		debug.FreeOSMemory()
	})
}
