package image

import (
	"errors"
	"testing"
	"time"
)

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
