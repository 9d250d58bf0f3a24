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

func TestChildThatExitsWithZero(t *testing.T) {
	c, log := script(t, `trap 'echo bye; exit 0' TERM`)
	if !c.running() {
		t.Error("it does not run")
	}
	check(t, terminate(t, c, settleTime))
	if c.running() {
		t.Error("it runs after its end")
	}
	if data, err := os.ReadFile(log); err != nil || !strings.HasSuffix(string(data), "bye\n") {
		t.Errorf("log is %q, error %v", data, err)
	}
	if err := terminate(t, c, time.Second); err == nil {
		t.Error("no error for a process that had ended")
	}
}

func TestChildThatExitsWithAnotherCode(t *testing.T) {
	c, _ := script(t, `trap 'exit 3' TERM`)
	if err := terminate(t, c, settleTime); err == nil || !strings.Contains(err.Error(), "exit status 3") {
		t.Errorf("got error %v", err)
	}
}

func TestChildThatIgnoresSIGTERM(t *testing.T) {
	c, _ := script(t, `trap '' TERM`)
	if err := terminate(t, c, 100*time.Millisecond); err == nil || !strings.Contains(err.Error(), "still runs") {
		t.Errorf("got error %v", err)
	}
	if c.running() {
		t.Error("it was not killed in the end")
	}
}

func TestKillTwice(t *testing.T) {
	c, _ := script(t, "")
	check(t, c.kill())
	check(t, c.kill())
	if c.running() {
		t.Error("it runs")
	}
}
