package kubelet

import (
	"context"
	"os"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// patience is the longest that a test waits for what has no limit of its own.
// A kubelet collects what is dead once a minute.
const patience = 4 * time.Minute

func limited(t testing.TB) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), patience)
	t.Cleanup(cancel)
	return ctx
}

func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(patience); !holds(); time.Sleep(100 * time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", patience, what)
		}
	}
}

func check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

func same(t testing.TB, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: want %q, got %q", what, want, got)
	}
}
