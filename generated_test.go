package minicri_test

import (
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// Who adds a key or a metric has its line in the page, too.
func TestGeneratedPagesAreCurrent(t *testing.T) {
	for _, page := range []string{"configuration", "metrics"} {
		want, err := exec.Command("go", "run", "./hack/manual", page).Output()
		must(t, err)
		got := harness.Read(t, "docs/"+page+".md")
		harness.Want(t, string(got) == string(want), "docs/%s.md is not what the source says: run make generate", page)
	}
}

// NOTICE names the modules that are linked into what make install installs, at
// their versions; hack/notice, which is slower, finds their licences.
func TestNoticeIsCurrent(t *testing.T) {
	want := slices.Concat(
		linked(t, "0", ".", "-tags", "grpcnotrace,nri_no_wasm", "./cmd/minicri"),
		linked(t, "1", ".", "-tags", "seccomp,runc_nocriu", "./cmd/minicri-shim"),
		linked(t, "0", "hack/plugins", "tool"))
	slices.Sort(want)
	want = slices.Compact(want)
	notice := harness.Read(t, "NOTICE")
	list, _, _ := strings.Cut(string(notice), "\n====")
	var got []string
	for _, line := range regexp.MustCompile(`(?m)^(\S+ v\S+): `).FindAllStringSubmatch(list, -1) {
		got = append(got, line[1])
	}
	slices.Sort(got)
	for _, module := range want {
		harness.Want(t, slices.Contains(got, module), "NOTICE does not name %s: run make generate", module)
	}
	for _, module := range got {
		harness.Want(t, slices.Contains(want, module), "NOTICE names %s, which no program has: run make generate", module)
	}
}

// linked are the modules of a program's packages: "path version".
func linked(t *testing.T, cgo, dir string, arguments ...string) (modules []string) {
	t.Setenv("CGO_ENABLED", cgo)
	t.Setenv("GOARCH", "amd64")
	packages, err := list(dir, append([]string{"-deps"}, arguments...)...)
	must(t, err)
	for _, p := range packages {
		if p.Module != nil && !p.Module.Main {
			modules = append(modules, p.Module.Path+" "+p.Module.Version)
		}
	}
	return modules
}
