package main

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"log/slog"
	"strings"
	"testing"
)

// Callers that have gone are lowered, whatever else libraries say is not.
func TestLibraryLog(t *testing.T) {
	var written bytes.Buffer
	handler := slog.NewTextHandler(&written, &slog.HandlerOptions{Level: slog.LevelDebug})
	logger := slog.New(libraryLog{handler}).With("library", "x")
	for want, say := range map[string]func(){
		"level=DEBUG": func() { logger.Error(lateAnswer, "stream", 1) },
		"level=DEBUG msg=failed": func() {
			logger.Error("failed", "error", fmt.Errorf("call: %w", context.Canceled))
		},
		"level=ERROR": func() { logger.Error("failed", "error", errors.New("disk full")) },
		"level=WARN":  func() { logger.Warn("odd") },
	} {
		written.Reset()
		say()
		if !strings.Contains(written.String(), want) {
			t.Errorf("%q has no %s", &written, want)
		}
	}
}
