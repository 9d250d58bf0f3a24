package minicri_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
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

// The helper programs in C are the same bytes wherever, whenever and in whatever
// locale they are built: what is installed can be compared with what the source makes.
func TestHelperProgramsAreReproducible(t *testing.T) {
	scripts, err := exec.Command("git", "ls-files", "*/build.sh").Output()
	must(t, err)
	built := 0
	for _, script := range strings.Fields(string(scripts)) {
		source := harness.Read(t, script)
		if !strings.Contains(string(source), ".elf") {
			continue
		}
		first := buildIn(t, filepath.Join(t.TempDir(), "a"), filepath.Dir(script), "LANG=C", "TZ=UTC")
		second := buildIn(t, filepath.Join(t.TempDir(), "another", "directory"), filepath.Dir(script), "LANG=de_DE.UTF-8", "TZ=Asia/Tokyo", "CFLAGS=-O0 -g", "LDFLAGS=-g")
		harness.Want(t, bytes.Equal(first, second), "%s makes %d bytes and %d other ones", script, len(first), len(second))
		built++
	}
	harness.Want(t, built != 0, "there is no helper program")
}

func buildIn(t *testing.T, dir, source string, environment ...string) []byte {
	must(t, os.CopyFS(dir, os.DirFS(source)))
	old, err := filepath.Glob(filepath.Join(dir, "*.elf"))
	must(t, err)
	for _, elf := range old {
		must(t, os.Remove(elf))
	}
	build := exec.Command("sh", filepath.Join(dir, "build.sh"))
	build.Env = append(os.Environ(), environment...)
	out, err := build.CombinedOutput()
	harness.Need(t, err == nil, "%v: %v: %s", build, err, out)
	made, err := filepath.Glob(filepath.Join(dir, "*.elf"))
	harness.Need(t, err == nil && len(made) == 1, "%s makes %v: %v", source, made, err)
	data := harness.Read(t, made[0])
	return data
}
