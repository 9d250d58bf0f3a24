package minicri_test

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/minicri/minicri/test/harness"
)

// wideFiles lists the files that still have lines of more than maxColumns columns. The list only shrinks.
const (
	wideFiles  = "hack/wide.txt"
	maxColumns = 120
)

// TestLinesFitOnAScreen checks the width of the lines of Go, C and shell. A file that became narrow has to leave
// the list: go test -run TestLinesFitOnAScreen . -update removes it.
func TestLinesFitOnAScreen(t *testing.T) {
	var listed, wide []string
	for line := range strings.Lines(string(harness.Read(t, wideFiles))) {
		if !strings.HasPrefix(line, "#") {
			listed = append(listed, strings.TrimSpace(line))
		}
	}
	checked := 0
	for _, file := range sources(t) {
		source, err := os.ReadFile(file)
		if err != nil || !isCode(file, source) {
			continue // git still lists a file that was removed
		}
		checked++
		first := 0
		number := 0
		for line := range strings.Lines(string(source)) {
			number++
			line = strings.TrimRight(line, "\n")
			if first == 0 && utf8.RuneCountInString(line)+3*strings.Count(line, "\t") > maxColumns {
				first = number
			}
		}
		if first == 0 {
			continue
		}
		wide = append(wide, file)
		harness.Want(t, slices.Contains(listed, file), "%s:%d has more than %d columns (a tab counts as 4)", file, first, maxColumns)
	}
	harness.Want(t, checked >= 300, "only %d files were checked", checked)
	left := slices.DeleteFunc(slices.Clone(listed), func(file string) bool { return !slices.Contains(wide, file) })
	if *update && len(left) < len(listed) {
		text := "# Files that still have lines of more than 120 columns. This list only shrinks: see TestLinesFitOnAScreen.\n"
		must(t, os.WriteFile(wideFiles, []byte(text+strings.Join(left, "\n")+"\n"), 0o644))
		return
	}
	for _, file := range listed {
		harness.Want(t, slices.Contains(left, file), "%s has no wide lines: remove it from %s, or run this test with -update", file, wideFiles)
	}
}

// sources are the files of the repository, new ones included.
func sources(t *testing.T) []string {
	out, err := exec.Command("git", "ls-files", "--cached", "--others", "--exclude-standard").Output()
	must(t, err)
	return strings.Fields(string(out))
}

// isCode reports whether a person writes the file in Go, C or shell.
func isCode(file string, source []byte) bool {
	switch filepath.Ext(file) {
	case ".go":
		return !strings.HasSuffix(file, ".pb.go") && !strings.Contains(file, "_ttrpc")
	case ".c", ".h":
		return true
	}
	first, _, _ := strings.Cut(string(source), "\n")
	return regexp.MustCompile(`^#!.*\b(sh|bash)$`).MatchString(first)
}

// skips are the files whose tests may be left out, with the reason of each call that does it. go test does not
// print a skip of a package that passes, so one that is not here would go unnoticed.
var skips = map[string][]string{
	"namespace/namespace_test.go": {"where the next pid cannot be chosen: ns_last_pid needs CAP_SYS_ADMIN and CONFIG_CHECKPOINT_RESTORE"},
	"network/runner/runner_test.go": {
		"where no hierarchy of cgroup v1 has the controller of pids: with version 2 it is not in a cgroup of its own",
		"where the kernel runs a program that is open for writing: nothing has to be waited for",
	},
	"supervisor/launch/pause_test.go": {"this machine may have no AppArmor: make test-um has"},
	"test/container/nri_test.go":      {"where the kernel has no NETLINK_XFRM, which libcontainer opens to move a device"},
	"test/hostile/stopper_test.go":    {"freezer.state is of cgroup v1", "memory.high is of cgroup v2"},
	"test/crash/disk_test.go":         {"a file that the kill before has cut off, and a start has removed, cannot be unreadable at one"},
	"test/crash/scale_test.go":        slices.Repeat([]string{"it takes minutes: make test-crash"}, 3),
}

func TestSkipsAreKnown(t *testing.T) {
	out, err := exec.Command("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.go").Output()
	must(t, err)
	calls := make(map[string]int)
	skip := regexp.MustCompile(`\w\.Skip(f|Now)?\(`)
	for file := range strings.Lines(string(out)) {
		file = strings.TrimSpace(file)
		source, _ := os.ReadFile(file) // one that git knows may have been removed
		calls[file] = len(skip.FindAll(source, -1))
		harness.Want(t, calls[file] == len(skips[file]), "%s skips tests in %d places: say why of each in size_test.go", file, calls[file])
	}
	for file := range skips {
		harness.Want(t, calls[file] != 0, "%s skips no test: remove it from the list", file)
	}
}
