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
	must(t, unix.Mkfifo(fifo, 0o600))
	must(t, os.WriteFile(base, []byte("{}"), 0o600))
	for text, key := range map[string]string{
		fmt.Sprintf("base_spec = %q", base):                                               "",
		`base_spec = "/nowhere/base.json"`:                                                "base_spec",
		fmt.Sprintf("base_spec = %q", fifo):                                               "base_spec",
		"[runtimes.strict]\ntype = \"builtin\"\nbase_spec = \"/nowhere/base.json\"":       "runtimes.strict.base_spec",
		fmt.Sprintf("[runtimes.strict]\ntype = \"builtin\"\nbase_spec = %q", t.TempDir()): "runtimes.strict.base_spec",
		`default_sysctls = ["kernel.panic=1"]`:                                            "default_sysctls",
		"socket = '/s'\nsockt = '/t'":                                                     `:2: unknown key "sockt"`,
		"\n[streaming]\ntls_cert = '/nowhere/c'\ntls_key = '/nowhere/k'":                  ":3: streaming.tls_cert",
		`default_ulimits = ["files=1"]`:                                                   "default_ulimits",
	} {
		file := filepath.Join(dir, "config.toml")
		must(t, os.WriteFile(file, []byte(text+"\n"), 0o600))
		err := configCommand(t.Context(), []string{"check", file}, io.Discard)
		if (err != nil) != (key != "") || err != nil && !strings.Contains(err.Error(), key) {
			t.Errorf("%s: %v", text, err)
		}
	}
}

// Each value is shown with its source, and what is wrong with the files is an error.
func TestConfigShow(t *testing.T) {
	file := filepath.Join(t.TempDir(), "config.toml")
	must(t, os.WriteFile(file, []byte("socket = '/nowhere/s'\n[limits]\nrun = '4m'\nrum = '5m'\n"), 0o600))
	var output strings.Builder
	err := configCommand(t.Context(), []string{"show", "--config", file, "--root", "/r"}, &output)
	if err == nil || !strings.Contains(err.Error(), file+":4: unknown key") {
		t.Errorf("%v", err)
	}
	for _, line := range []string{"socket = '/nowhere/s'  # " + file + ":1\n", "root = '/r'  # --root\n", "limits.run = '4m0s'  # " + file + ":3\n", "limits.kill = '10s'  # default\n", "runtimes.runc.type = 'builtin'  # default\n"} {
		if !strings.Contains(output.String(), line) {
			t.Errorf("no line %q in\n%s", line, output.String())
		}
	}
}
