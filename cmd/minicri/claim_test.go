package main

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/state"
)

// A daemon that is killed as it writes a file of the directories themselves, such
// as node.json, leaves a temporary one. The next daemon removes it.
func TestWritesThatWereCutOffAreCleared(t *testing.T) {
	c := &config.Config{Root: t.TempDir(), State: t.TempDir()}
	kept := filepath.Join(c.Root, "node.json")
	must(t, state.WriteFile(kept, []byte("{}"), false))
	cutOff := []string{filepath.Join(c.Root, ".new-node.json-1"), filepath.Join(c.State, ".new-boot-id-2")}
	for _, path := range cutOff {
		must(t, os.WriteFile(path, nil, 0o600))
	}
	unlock, err := lockDirectories(c)
	must(t, err)
	defer unlock()
	for _, path := range cutOff {
		if _, err := os.Lstat(path); !os.IsNotExist(err) {
			t.Errorf("%s is left: %v", path, err)
		}
	}
	if _, err := os.Lstat(kept); err != nil {
		t.Error(err)
	}
}
