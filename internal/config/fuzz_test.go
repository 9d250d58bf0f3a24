package config

import (
	"os"
	"path/filepath"
	"testing"
)

// FuzzLoadFile: whatever a file holds, it nothing panics, and commands that look at a node
// have a configuration.
func FuzzLoadFile(f *testing.F) {
	f.Add([]byte("root = '/var/lib/x'\n[images]\nprogress_timeout = '5s'\npinned = ['busybox']\n"))
	f.Add([]byte("[images]\nprogress_timeout = 60\n"))
	f.Add([]byte("[limits]\nrun = '-1h'\n"))
	f.Add([]byte("[runtimes.kata]\ntype = 'shim'\n"))
	f.Fuzz(func(t *testing.T, data []byte) {
		file := filepath.Join(t.TempDir(), "config.toml")
		must(t, os.WriteFile(file, data, 0o600))
		l := read(t, "--config", file)
		_ = l.Check()
		_ = l.Handlers()
	})
}
