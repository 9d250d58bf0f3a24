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
		isListed, isWide, number := slices.Contains(listed, file), false, 0
		for line := range strings.Lines(string(source)) {
			number++
			if utf8.RuneCountInString(strings.TrimRight(line, "\n"))+3*strings.Count(line, "\t") <= maxColumns {
				continue
			}
			isWide = true
			harness.Want(t, isListed, "%s:%d has more than %d columns (a tab counts as 4)", file, number, maxColumns)
		}
		if isWide {
			wide = append(wide, file)
		}
	}
	harness.Want(t, checked >= 300, "only %d files were checked", checked)
	left := slices.DeleteFunc(slices.Clone(listed), func(file string) bool { return !slices.Contains(wide, file) })
	if *update && len(left) < len(listed) {
		const text = "# Files that still have lines of more than 120 columns. " +
			"This list only shrinks: see TestLinesFitOnAScreen.\n"
		must(t, os.WriteFile(wideFiles, []byte(text+strings.Join(left, "\n")+"\n"), 0o644))
		return
	}
	for _, file := range listed {
		harness.Want(t, slices.Contains(left, file),
			"%s has no wide lines: remove it from %s, or run this test with -update", file, wideFiles)
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

// TestListsNameTests checks that every test that a list of hack/ names exists in its package.
func TestListsNameTests(t *testing.T) {
	for _, list := range append(harness.Glob(t, "hack/um/*.txt"), "hack/wiring.txt", "hack/skips.txt") {
		for line := range strings.Lines(string(harness.Read(t, list))) {
			fields := strings.Fields(line)
			if len(fields) < 2 || strings.HasPrefix(line, "#") {
				continue
			}
			names := testsIn(t, fields[0])
			harness.Want(t, len(names) > 0, "%s: %s has no tests", list, fields[0])
			for _, pattern := range patterns(fields[1:]) {
				harness.Want(t, slices.ContainsFunc(names, regexp.MustCompile(pattern).MatchString),
					"%s: %s has no test %s", list, fields[0], pattern)
			}
		}
	}
}

// TestEveryPackageIsInAPart checks that hack/test names each package below test/ that has tests.
func TestEveryPackageIsInAPart(t *testing.T) {
	parts := string(harness.Read(t, "hack/test"))
	for _, file := range harness.Glob(t, "test/*/*_test.go") {
		name := filepath.Base(filepath.Dir(file))
		named := regexp.MustCompile(`[ /]` + name + `\b`).MatchString(parts)
		harness.Want(t, named, "no part of hack/test has test/%s", name)
	}
}

// patterns returns the patterns of -test.run and -test.skip, or the first field if it is a name.
func patterns(fields []string) (all []string) {
	if name, isTest := strings.CutPrefix(fields[0], "Test"); isTest {
		top, _, _ := strings.Cut(name, "/")
		return []string{"^Test" + top + "$"}
	}
	for _, field := range fields {
		if list, found := strings.CutPrefix(field, "-test.run="); found {
			all = append(all, strings.Split(list, "|")...)
		}
		if list, found := strings.CutPrefix(field, "-test.skip="); found {
			all = append(all, strings.Split(list, "|")...)
		}
	}
	return all
}

// testsIn returns the names of the tests of a package, with any build tags.
func testsIn(t *testing.T, pkg string) (names []string) {
	for _, file := range harness.Glob(t, pkg, "*_test.go") {
		for _, found := range regexp.MustCompile(`(?m)^func (Test\w+)\(`).FindAllSubmatch(harness.Read(t, file), -1) {
			names = append(names, string(found[1]))
		}
	}
	return names
}
