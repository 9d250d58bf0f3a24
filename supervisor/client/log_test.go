package client_test

import (
	"bytes"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/client"
)

// linesOf is a log that may be read while it is written.
type linesOf struct {
	mu sync.Mutex
	b  bytes.Buffer
}

func (l *linesOf) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.Write(p)
}

func (l *linesOf) text() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.b.String()
}

// What a supervisor logs is in the daemon's log, once, with its level, also what it
// logged while there was no daemon; and its file does not grow.
func TestLogIsPassedOn(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "build", client.Log)
	if err := os.Mkdir(filepath.Dir(path), 0o700); err != nil {
		t.Fatal(err)
	}
	file, err := os.OpenFile(path, os.O_CREATE|os.O_WRONLY|os.O_APPEND, 0o600)
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	said := 0
	for range 2 {
		for range 3000 { // more than is kept
			said++
			fmt.Fprintf(file, "time=2026-11-23T00:00:00Z level=WARN msg=\"line %d of some hundred bytes\" container=%s\n", said, strings.Repeat("c", 64))
		}
		fmt.Fprintln(file, `time="2026-11-23T00:00:00Z" level=error msg="failed sending message on channel"`)
		fmt.Fprintln(file, "panic: it fails")
		var daemon linesOf
		set, err := client.NewSet(client.SetOptions{Dir: dir, Logger: slog.New(slog.NewTextHandler(&daemon, nil))})
		if err != nil {
			t.Fatal(err)
		}
		for deadline := time.Now().Add(time.Minute); !strings.Contains(daemon.text(), "panic: it fails"); time.Sleep(10 * time.Millisecond) {
			if time.Now().After(deadline) {
				t.Fatalf("not passed on: %.1000s", daemon.text())
			}
		}
		set.Close()
		text := daemon.text()
		if n := strings.Count(text, "level=WARN msg=supervisor build=build said=\"msg=\\\"line "); n != 3000 || !strings.Contains(text, "level=ERROR msg=supervisor build=build said=\"panic: it fails\"") {
			t.Errorf("%d of 3000 lines, %.300s", n, text)
		}
		if strings.Contains(text, "failed sending") {
			t.Error("what a library says is not for debugging alone")
		}
	}
	var info unix.Stat_t
	if err := unix.Stat(path, &info); err != nil {
		t.Fatal(err)
	}
	if kept := info.Blocks * 512; kept > 300<<10 || info.Size < 600<<10 {
		t.Errorf("of a log of %d bytes %d are kept", info.Size, kept)
	}
}
