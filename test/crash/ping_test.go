package crash

import (
	"fmt"
	"os"
	"sync"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// 100,000 health checks, by clients that come and go, leave no descriptor, no thread
// to speak of and no memory; what the first thousands made stays as it is.
func TestProperty57_HealthChecksLeakNothing(t *testing.T) {
	if testing.Short() {
		t.Skip("make test-crash runs it")
	}
	const first, all, clients = 10000, 100000, 8
	n := newNode(t)
	n.runWitness(t)
	ping := func(times int) {
		ctx := harness.Limited(t, 10*time.Minute)
		var wait sync.WaitGroup
		for range clients {
			wait.Go(func() {
				for range times / clients {
					if _, err := n.Runtime.Version(ctx, &runtimeapi.VersionRequest{}); err != nil {
						t.Error(err)
						return
					}
					if _, err := n.Runtime.Status(ctx, &runtimeapi.StatusRequest{}); err != nil {
						t.Error(err)
						return
					}
				}
			})
		}
		wait.Wait()
	}
	open := func() int {
		files, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", n.PID()))
		check(t, err)
		return len(files)
	}
	// What a process has allocated: not pages of its program, which the kernel drops
	// when memory is short.
	anonymous := func() int { return harness.ProcKiB(t, n.PID(), "RssAnon") }
	ping(first)
	before, files := anonymous(), open()
	ping(all - first)
	// What was allocated in a burst is collected, and given back, when it is over.
	busy, after := anonymous(), 0
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(100 * time.Millisecond) {
		after = anonymous()
		if after <= before+2<<10 {
			break
		}
		if time.Now().After(deadline) {
			t.Errorf("the daemon has %d KiB a minute after %d health checks, after the first %d it had %d KiB", after, all, first, before)
			break
		}
	}
	fmt.Printf("%d health checks: the daemon has %d KiB, %d KiB at their end, after the first %d it had %d KiB; %d descriptors, %d\n", all, after, busy, first, before, open(), files)
	if now := open(); now > files+4 {
		t.Errorf("%d descriptors, there were %d", now, files)
	}
}
