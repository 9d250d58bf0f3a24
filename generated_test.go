package minicri_test

import (
	"encoding/json"
	"errors"
	"io"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"
)

// Who adds a key or a metric has its line in the page, too.
func TestGeneratedPagesAreCurrent(t *testing.T) {
	for _, page := range []string{"configuration", "metrics"} {
		want, err := exec.Command("go", "run", "./hack/manual", page).Output()
		must(t, err)
		got, err := os.ReadFile("docs/" + page + ".md")
		must(t, err)
		if string(got) != string(want) {
			t.Errorf("docs/%s.md is not what the source says: run make generate", page)
		}
	}
}

// NOTICE names the modules that are linked into what make install installs, at
// their versions; hack/notice, which is slower, finds their licences.
func TestNoticeIsCurrent(t *testing.T) {
	want := slices.Concat(
		linked(t, "0", "-tags", "grpcnotrace,nri_no_wasm", "./cmd/minicri"),
		linked(t, "1", "-tags", "seccomp,runc_nocriu", "./cmd/minicri-shim"),
		linked(t, "0", "-C", "hack/plugins", "tool"))
	slices.Sort(want)
	want = slices.Compact(want)
	notice, err := os.ReadFile("NOTICE")
	must(t, err)
	list, _, _ := strings.Cut(string(notice), "\n====")
	var got []string
	for _, line := range regexp.MustCompile(`(?m)^(\S+ v\S+): `).FindAllStringSubmatch(list, -1) {
		got = append(got, line[1])
	}
	slices.Sort(got)
	for _, module := range want {
		if !slices.Contains(got, module) {
			t.Errorf("NOTICE does not name %s: run make generate", module)
		}
	}
	for _, module := range got {
		if !slices.Contains(want, module) {
			t.Errorf("NOTICE names %s, which no program has: run make generate", module)
		}
	}
}

// linked are the modules of a program's packages: "path version".
func linked(t *testing.T, cgo string, arguments ...string) (modules []string) {
	t.Helper()
	list := []string{"list", "-deps", "-json=Module"}
	if arguments[0] == "-C" { // has to be the first flag
		list, arguments = append([]string{"list", "-C", arguments[1]}, list[1:]...), arguments[2:]
	}
	command := exec.Command("go", append(list, arguments...)...)
	command.Env = append(os.Environ(), "CGO_ENABLED="+cgo, "GOARCH=amd64")
	command.Stderr = os.Stderr
	out, err := command.Output()
	if err != nil {
		t.Fatalf("%v: %v", command, err)
	}
	for decoder := json.NewDecoder(strings.NewReader(string(out))); ; {
		var p struct {
			Module *struct {
				Path, Version string
				Main          bool
			}
		}
		if err := decoder.Decode(&p); errors.Is(err, io.EOF) {
			return modules
		} else if err != nil {
			t.Fatal(err)
		}
		if p.Module != nil && !p.Module.Main {
			modules = append(modules, p.Module.Path+" "+p.Module.Version)
		}
	}
}
