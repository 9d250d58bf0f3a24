package image

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

func writeVerifier(t *testing.T, dir, name, script string) {
	must(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script), 0o755))
}

func TestVerifiersDecide(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "verifiers")
	s, registry := openStore(t, func(c *Config) { c.VerifierDir = dir }), newTestRegistry(t)
	img := smallImage(t)
	reference := registry.push(t, "signed:1", img)
	unverified := func(err error) bool { return errors.Is(err, ErrVerification) }
	refused := func(words string) { checkRefused(t, s, reference, Auth{}, unverified, words) }
	refused("no such file") // missing: closed
	must(t, os.Mkdir(dir, 0o755))
	refused("no verifier") // empty: closed
	writeVerifier(t, dir, "1", `[ "$2" = "`+reference+`" ] && [ "$4" = "`+digestOf(t, img)+`" ] && grep -q digest`)
	writeVerifier(t, dir, "2", `echo not signed by us; exit 1`)
	refused("not signed by us")
	harness.Want(t, len(registry.blobGets("")) == 0 && len(s.List()) == 0, "a refused image was fetched")
	writeVerifier(t, dir, "2", `exit 0`)
	pull(t, s, reference)
	for i := range 20 { // the library would stop at a number of them
		writeVerifier(t, dir, string(rune('a'+i)), "exit 0")
	}
	writeVerifier(t, dir, "y", "echo the last; exit 1")
	refused("the last")
	writeVerifier(t, dir, "1", "sleep 3600")
	s.Reconfigure(Config{VerifierDir: dir, VerifierTimeout: 200 * time.Millisecond})
	refused("")
}
