package main

import (
	"bytes"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/manual"
)

func TestConfigurationIsCurrent(t *testing.T) {
	written, err := os.ReadFile("../../docs/configuration.md")
	if err != nil {
		t.Fatal(err)
	}
	if string(written) != configuration() {
		t.Error("docs/configuration.md is not what internal/config says: run make generate")
	}
}

// groff warns of unknown macros and of lines that a stray dot made a macro.
func TestPagesAreGoodRoff(t *testing.T) {
	for name, text := range map[string]string{"man8": programPage(), "man5": filePage()} {
		command := exec.Command("groff", "-man", "-ww", "-z", "-Tutf8")
		command.Stdin = strings.NewReader(text)
		out, err := command.CombinedOutput()
		if err != nil || len(out) > 0 {
			t.Errorf("%s: %v\n%s", name, err, out)
		}
	}
}

func TestPagesNameEverything(t *testing.T) {
	for _, c := range manual.Commands(program) {
		text := programPage()
		if !strings.Contains(text, roff(manual.Line(c))) || !strings.Contains(text, roff(c.Long)) {
			t.Errorf("man8 does not explain %q", manual.Line(c))
		}
	}
	for _, f := range daemonFlags() {
		if !strings.Contains(programPage(), roff("--"+f.Name)) {
			t.Errorf("man8 does not explain --%s", f.Name)
		}
	}
}

func TestUnknownPage(t *testing.T) {
	for _, arguments := range [][]string{nil, {"x"}, {"man8", "man5"}} {
		if err := run(slices.Clone(arguments), &bytes.Buffer{}); err == nil {
			t.Errorf("manual %q is no error", arguments)
		}
	}
}

// The installed file sets nothing, and without the '#' of its keys it is the default.
func TestInstalledFileIsOfComments(t *testing.T) {
	if err := share(t.TempDir()); err != nil {
		t.Fatal(err)
	}
	text, err := commentedFile()
	if err != nil {
		t.Fatal(err)
	}
	var uncommented, want strings.Builder
	for line := range strings.Lines(strings.TrimPrefix(text, fileHead)) {
		if line != "\n" && line[0] != '#' {
			t.Errorf("the file sets something: %s", line)
		}
		if len(line) > 1 && line[1] != ' ' {
			line = line[1:]
		}
		uncommented.WriteString(line)
	}
	if err := config.Default().Write(&want); err != nil || uncommented.String() != want.String() {
		t.Errorf("without '#' it is not the default: %v\n%s", err, uncommented.String())
	}
}
