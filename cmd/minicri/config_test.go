package main

import (
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
)

// What the daemon refuses at its start is refused by the check, with its key.
func TestConfigCheck(t *testing.T) {
	dir := t.TempDir()
	fifo, base := filepath.Join(dir, "fifo"), filepath.Join(dir, "base.json")
	if err := unix.Mkfifo(fifo, 0o600); err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(base, []byte("{}"), 0o600); err != nil {
		t.Fatal(err)
	}
	for text, key := range map[string]string{
		fmt.Sprintf("base_spec = %q", base):                                               "",
		`base_spec = "/nowhere/base.json"`:                                                "base_spec",
		fmt.Sprintf("base_spec = %q", fifo):                                               "base_spec",
		"[runtimes.strict]\ntype = \"builtin\"\nbase_spec = \"/nowhere/base.json\"":       "runtimes.strict.base_spec",
		fmt.Sprintf("[runtimes.strict]\ntype = \"builtin\"\nbase_spec = %q", t.TempDir()): "runtimes.strict.base_spec",
		`default_sysctls = ["kernel.panic=1"]`:                                            "default_sysctls",
		`default_ulimits = ["files=1"]`:                                                   "default_ulimits",
	} {
		file := filepath.Join(dir, "config.toml")
		if err := os.WriteFile(file, []byte(text+"\n"), 0o600); err != nil {
			t.Fatal(err)
		}
		err := configCommand([]string{"check", file}, io.Discard)
		if (err != nil) != (key != "") || err != nil && !strings.Contains(err.Error(), key) {
			t.Errorf("%s: %v", text, err)
		}
	}
}
