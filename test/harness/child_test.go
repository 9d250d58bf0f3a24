package harness

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// script starts a shell and waits until it says that it is ready.
func script(t *testing.T, text string) (c *child, log string) {
	t.Helper()
	log = filepath.Join(t.TempDir(), "log")
	c, err := startChild(exec.Command("sh", "-c", text+"\necho ready; while :; do sleep 0.01; done"), log)
	check(t, err)
	t.Cleanup(func() { check(t, c.kill()) })
	Eventually(t, "the script is ready", settleTime, func() bool {
		data, err := os.ReadFile(log)
		check(t, err)
		return strings.Contains(string(data), "ready")
	})
	return c, log
}

func terminate(t *testing.T, c *child, limit time.Duration) error {
	t.Helper()
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	return c.terminate(ctx)
}

// A child that ends by SIGTERM within the limit, with code 0, is no error; any other end
// is said to be one, and after each the child is gone.
func TestChild(t *testing.T) {
	for _, c := range []struct {
		script string
		limit  time.Duration
		says   string
	}{
		{`trap 'echo bye; exit 0' TERM`, settleTime, ""},
		{`trap 'echo bye; exit 3' TERM`, settleTime, "exit status 3"},
		{`trap '' TERM`, 100 * time.Millisecond, "still runs"},
	} {
		child, log := script(t, c.script)
		if !child.running() {
			t.Errorf("%s: it does not run", c.script)
		}
		if err := terminate(t, child, c.limit); (err == nil) != (c.says == "") || err != nil && !strings.Contains(err.Error(), c.says) {
			t.Errorf("%s: got error %v, want %q", c.script, err, c.says)
		}
		if data, err := os.ReadFile(log); err != nil || strings.HasSuffix(string(data), "bye\n") != strings.Contains(c.script, "bye") {
			t.Errorf("%s: log is %q, error %v", c.script, data, err)
		}
		if child.running() || terminate(t, child, time.Second) == nil {
			t.Errorf("%s: it runs after its end", c.script)
		}
	}
	killed, _ := script(t, "")
	check(t, killed.kill())
	check(t, killed.kill())
	if killed.running() {
		t.Error("it runs")
	}
}
