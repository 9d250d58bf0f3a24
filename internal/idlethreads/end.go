// Package idlethreads ends threads of this process that have nothing to do. The Go
// runtime has one for each goroutine in a system call, and keeps it for good: a burst
// of two hundred pods leaves two hundred threads. It has no state and no lock.
package idlethreads

import (
	"runtime"
	"runtime/metrics"
)

// End ends idle threads until about spare of them are left for what comes next. A
// child with a parent death signal is killed with the thread that has started it
// (PR_SET_PDEATHSIG(2const)): who starts one keeps its thread, runtime.LockOSThread.
func End(spare int) {
	for range idle() - spare {
		done := make(chan struct{})
		go endThread(done)
		<-done
	}
}

// endThread returns with its thread locked, which ends that (runtime.LockOSThread);
// the runtime takes an idle one in its place.
func endThread(done chan<- struct{}) {
	runtime.LockOSThread()
	close(done)
}

// idle is about how many threads wait for work: all but those in system calls.
func idle() int {
	samples := []metrics.Sample{{Name: "/sched/threads/total:threads"}, {Name: "/sched/goroutines/not-in-go:goroutines"}}
	metrics.Read(samples)
	return int(samples[0].Value.Uint64()) - int(samples[1].Value.Uint64())
}
