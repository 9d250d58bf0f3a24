package minicri_test

import (
	"bytes"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

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
