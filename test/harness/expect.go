package harness

import (
	"context"
	"testing"
	"time"
)

// Check ends the test with the error, if there is one.
func Check(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}

// Same fails the test unless two texts are the same.
func Same(t testing.TB, what, got, want string) {
	t.Helper()
	if got != want {
		t.Errorf("%s: want %q, got %q", what, want, got)
	}
}

// Limited is a context for calls of a test, which ends after the limit and with
// the test. It is no child of the test's own context, so that cleanups may use
// it.
func Limited(t testing.TB, limit time.Duration) context.Context {
	t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), limit)
	t.Cleanup(cancel)
	return ctx
}

// pollInterval is how often Eventually asks.
const pollInterval = 5 * time.Millisecond

// Eventually polls until the condition holds, and ends the test if it does not
// within the limit.
func Eventually(t testing.TB, what string, limit time.Duration, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(limit); !holds(); time.Sleep(pollInterval) {
		if time.Now().After(deadline) {
			t.Fatalf("not within %v: %s", limit, what)
		}
	}
}
