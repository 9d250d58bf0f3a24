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
	return harness.Limited(t, patience)
}

func eventually(t testing.TB, what string, holds func() bool) {
	t.Helper()
	harness.Eventually(t, what, patience, holds)
}

func check(t testing.TB, err error) {
	t.Helper()
	harness.Check(t, err)
}

func same(t testing.TB, what, got, want string) {
	t.Helper()
	harness.Same(t, what, got, want)
}
