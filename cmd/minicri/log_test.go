package main

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// Callers that have gone are lowered, whatever else libraries say is not.
func TestLibraryLog(t *testing.T) {
	var written bytes.Buffer
	handler := slog.NewTextHandler(&written, &slog.HandlerOptions{Level: slog.LevelDebug})
	logger := slog.New(libraryLog{handler}).With("library", "x")
	for want, say := range map[string]func(){
		"level=DEBUG":            func() { logger.Error(lateAnswer, "stream", 1) },
		"level=DEBUG msg=failed": func() { logger.Error("failed", "error", fmt.Errorf("call: %w", context.Canceled)) },
		"level=ERROR":            func() { logger.Error("failed", "error", errors.New("disk full")) },
		"level=WARN":             func() { logger.Warn("odd") },
	} {
		written.Reset()
		say()
		harness.Want(t, strings.Contains(written.String(), want), "%q has no %s", &written, want)
	}
}

// Each line has the priority of its record, for journalctl -p err; a line of JSON is one.
func TestPrioritiesAndForms(t *testing.T) {
	var written bytes.Buffer
	logger := slog.New(newHandler(&written, "text", slog.LevelDebug, true)).With("pod", "web")
	for want, say := range map[string]func(string, ...any){"<3>": logger.Error, "<4>": logger.Warn, "<6>": logger.Info, "<7>": logger.Debug} {
		written.Reset()
		say("x")
		harness.Want(t, strings.HasPrefix(written.String(), want+"time=") && strings.Contains(written.String(), "pod=web"),
			"%q does not begin with %s", &written, want)
	}
	written.Reset()
	slog.New(newHandler(&written, "json", nil, false)).Info("x", "pod", "web", "took", 1500*time.Millisecond)
	var line struct{ Msg, Pod, Took string }
	err := json.Unmarshal(written.Bytes(), &line)
	harness.Want(t, err == nil && line.Msg == "x" && line.Pod == "web" && line.Took == "1.5s", "%s: %v", &written, err)
}

// The last line has the priority of an error in the journal, and the form of the log.
func TestLastLineHasTheFormOfTheLog(t *testing.T) {
	failed := errors.New("no \"bridge\"")
	for want, say := range map[string]func(*bytes.Buffer){
		"minicri: no \"bridge\"\n":    func(to *bytes.Buffer) { sayLast(to, false, failed) },
		"<3>minicri: no \"bridge\"\n": func(to *bytes.Buffer) { sayLast(to, true, endError{failed, "text"}) },
		"<3>{\"time\":":               func(to *bytes.Buffer) { sayLast(to, true, endError{failed, "json"}) },
	} {
		var written bytes.Buffer
		say(&written)
		harness.Want(t, strings.HasPrefix(written.String(), want), "%q does not begin with %q", &written, want)
	}
	var written bytes.Buffer
	sayLast(&written, false, endError{failed, "json"})
	var line struct{ Level, Err string }
	err := json.Unmarshal(written.Bytes(), &line)
	harness.Want(t, err == nil && line.Level == "ERROR" && line.Err == failed.Error(), "%s: %v", &written, err)
	file := filepath.Join(t.TempDir(), "config.toml")
	must(t, os.WriteFile(file, []byte("log_format = 'json'\nshm_size = 1\n"), 0o600))
	err = serve(t.Context(), []string{"--config", file})
	end, is := errors.AsType[endError](err)
	harness.Want(t, is && end.form == "json", "a daemon with a broken configuration: %T: %v", err, err)
}
