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
	for _, c := range manual.Commands() {
		for name, text := range map[string]string{"man8": programPage(), "usage": manual.Usage()} {
			if !strings.Contains(text, c.Line()) && !strings.Contains(text, roff(c.Line())) || !strings.Contains(text, strings.Split(roff(c.Help), `\`)[0]) {
				t.Errorf("%s does not explain %q", name, c.Line())
			}
		}
		for name, text := range map[string]string{"bash": bashCompletion(), "zsh": zshCompletion(), "fish": fishCompletion()} {
			for _, word := range strings.Fields(c.Words) {
				if !strings.Contains(text, word) {
					t.Errorf("the completion of %s does not know %q", name, c.Words)
				}
			}
		}
	}
	for _, f := range daemonFlags() {
		if !strings.Contains(programPage(), roff("--"+f.Name)) {
			t.Errorf("man8 does not explain --%s", f.Name)
		}
	}
}

// The Tab key completes commands, flags and names.
func TestBashCompletes(t *testing.T) {
	for _, test := range []struct{ line, want string }{
		{"minicri conf", "config"},
		{"minicri --sock", "--socket"},
		{"minicri config ", "default check show from-containerd"},
		{"minicri image im", "import"},
		{"minicri check --f", "--fix --force"},
		{"minicri check --fix --js", "--json"},
		{"minicri image pull --cr", "--creds"},
		{"minicri config check manual_t", "manual_test.go"},
		{"minicri --config manual_t", "manual_test.go"},
		{"minicri version ", ""},
		{"minicri timeline shop/c", "shop/cart-1"},
		{"minicri pods shop/w", "shop/web"},
		{"minicri timeline w", "web"},
		{"minicri timeline 0", "0a 0b"},
		{"minicri image rm do", "docker.io/library/busybox:latest"},
		{"minicri image save r", "registry.example/a:1"},
		{"minicri image pull do", ""},
		{"minicri pods -", "--watch --wide -n --phase -o --json " +
			"--certs-dir --cni-bin-dir --cni-conf-dir --config --log-level --netns-dir --root --shim --socket --state"},
	} {
		script := bashCompletion() + `
			minicri() {
				case $1 in
				pods) printf '%s\n' 'ID NAME STATE' '0a shop/cart-1 ready' '0b shop/web ready' '0c shop/w$(id) ready' '2 pods; daemon 1MiB' ;;
				image) printf '%s\n' 'IMAGE DIGEST' 'docker.io/library/busybox:latest 1' 'registry.example/a:1 2' ;;
				esac
			}
			IFS=' ' read -ra COMP_WORDS <<<"$1"
			case $1 in *' ') COMP_WORDS+=('') ;; esac
			COMP_CWORD=$((${#COMP_WORDS[@]} - 1)) && _minicri && echo "${COMPREPLY[*]}"`
		out, err := exec.Command("bash", "-euc", script, "bash", test.line).CombinedOutput()
		if got := strings.TrimSpace(string(out)); err != nil || got != test.want {
			t.Errorf("%q completes to %q, %v; want %q", test.line, got, err, test.want)
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
