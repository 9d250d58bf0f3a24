package sandbox

import (
	"context"
	"errors"
	"fmt"
	"sync"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/step"
)

func named(name string, attempt uint32) *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: name, Attempt: attempt}}
}

// However often and however fast one pod is asked for, there is one sandbox.
func TestReserveGivesANameOnce(t *testing.T) {
	s := checker(t)
	var wait sync.WaitGroup
	var made atomic.Int32
	for range 100 {
		wait.Go(func() {
			sb, other, err := s.reserve(named("web", 0), "", step.NewTimeline(nil))
			if err != nil || (sb == nil) == (other == nil) {
				t.Errorf("reserve = %v, %v, %v", sb, other, err)
			} else if sb != nil {
				made.Add(1)
			}
			for _, one := range s.Building() { // as the debug socket shows them
				if one.CreatedAt == 0 {
					t.Error("one is seen that was not created yet")
				}
			}
		})
	}
	wait.Wait()
	if made.Load() != 1 {
		t.Errorf("%d callers were told to make the sandbox", made.Load())
	}
	if sb, _, err := s.reserve(named("web", 1), "", step.NewTimeline(nil)); err != nil || sb == nil {
		t.Errorf("the next attempt got %v, %v", sb, err)
	}
}

// created_at grows whatever the clock does: here the last one lies a day ahead,
// as after a clock that was set back, and many come within one tick.
func TestCreatedAtGrowsUnderClockJumps(t *testing.T) {
	s := checker(t)
	ahead := time.Now().Add(24 * time.Hour).UnixNano()
	must(t, s.restoreOne(storedRecord(t, "old", ahead), Facts{}, false))
	last := ahead
	for i := range 1000 {
		sb, _, err := s.reserve(named("web", uint32(i)), "", step.NewTimeline(nil))
		must(t, err)
		if sb.CreatedAt <= last {
			t.Fatalf("sandbox %d is created at %d, the one before at %d", i, sb.CreatedAt, last)
		}
		last = sb.CreatedAt
	}
}

func storedRecord(t *testing.T, name string, createdAt int64) Record {
	t.Helper()
	record, err := checker(t).newRecord(named(name, 0), "")
	must(t, err)
	record.CreatedAt = createdAt
	return record
}

// What is listed after a restart follows from the facts and the boot.
func TestRestoreOneFollowsTheFacts(t *testing.T) {
	ready := Facts{BootID: "now", ReadyAt: time.Now()}
	stopped := ready
	stopped.StoppedAt = time.Now()
	before := ready
	before.BootID = "before"
	for i, test := range []struct {
		name          string
		facts         Facts
		rebooted      bool
		listed, ready bool
	}{
		{"ready", ready, false, true, true},
		{"stopped", stopped, false, true, false},
		{"cut off", Facts{}, false, false, false},
		{"facts of an earlier boot", before, false, true, false},
		{"no facts after a boot", Facts{}, true, true, false},
		{"facts of this boot, without its marker", ready, true, true, true},
	} {
		s := checker(t)
		s.bootID, s.rebooted = "now", test.rebooted
		record := storedRecord(t, fmt.Sprint("pod", i), int64(i+1))
		must(t, s.restoreOne(record, test.facts, false))
		sb, _ := s.Get(record.ID)
		if sb.Listed() != test.listed || sb.Ready() != test.ready {
			t.Errorf("%s: listed %v, ready %v, want %v and %v", test.name, sb.Listed(), sb.Ready(), test.listed, test.ready)
		}
	}
}

// Who waits for a sandbox gets what came of it, or gives up with the context.
func TestAwait(t *testing.T) {
	building := newSandbox(Record{ID: "a"}, named("web", 0))
	cause := errors.New("no patience")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(cause)
	if _, err := building.await(ctx); !errors.Is(err, cause) {
		t.Errorf("a caller without patience got %v", err)
	}
	close(building.built)
	if _, err := building.await(t.Context()); !errdefs.IsAlreadyExists(err) {
		t.Errorf("the name of a sandbox that is not ready: %v, want AlreadyExists", err)
	}
	building.Update(func(f *Facts) { f.ReadyAt = time.Now() })
	if id, err := building.await(t.Context()); err != nil || id != "a" {
		t.Errorf("await = %q, %v", id, err)
	}
	failed := newSandbox(Record{ID: "b"}, named("web", 1))
	failed.runErr = cause
	close(failed.built)
	if _, err := failed.await(t.Context()); !errors.Is(err, cause) {
		t.Errorf("await of a failed Run = %v", err)
	}
}
