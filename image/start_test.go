package image

import (
	"bytes"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// What docker's config.json has and pulls do not use is said at the start.
func TestUnsupportedKeysOfDockerConfigAreSaid(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.json")
	writeFile(t, path, `{"auths":{},"credsStore":"desktop","credHelpers":{"gcr.io":"gcloud"}}`)
	var log bytes.Buffer
	openStore(t, func(c *Config) { c.DockerConfig, c.Logger = path, slog.New(slog.NewTextHandler(&log, nil)) })
	if text := log.String(); !strings.Contains(text, "level=WARN") || !strings.Contains(text, "credsStore credHelpers") || !strings.Contains(text, path) {
		t.Errorf("the log says %q", text)
	}
}

func TestVerifierTimeoutIsConfigured(t *testing.T) {
	dir := t.TempDir()
	writeVerifier(t, dir, "1", "sleep 3600")
	s, registry := openStore(t, func(c *Config) { c.VerifierDir, c.VerifierTimeout = dir, 200*time.Millisecond }), newTestRegistry(t)
	began := time.Now()
	_, err := s.Pull(t.Context(), registry.push(t, "signed:1", smallImage(t)), Auth{}, nil)
	if !errors.Is(err, ErrVerification) || time.Since(began) > 9*time.Second {
		t.Errorf("after %s: %v", time.Since(began), err)
	}
}

func TestEndOfAPullIsObserved(t *testing.T) {
	var ended []PullResult
	s, registry := openStore(t, func(c *Config) { c.Observe = func(r PullResult) { ended = append(ended, r) } }), newTestRegistry(t)
	img, _ := bigImage(t)
	pull(t, s, registry.push(t, "observed:1", img))
	if _, err := s.Pull(t.Context(), registry.host()+"/no/such:1", Auth{}, nil); err == nil {
		t.Error("pulled")
	}
	if len(ended) != 2 || ended[0].Err != nil || ended[0].Bytes < 2<<20 || ended[0].Took <= 0 || ended[1].Err == nil {
		t.Errorf("observed: %+v", ended)
	}
}
