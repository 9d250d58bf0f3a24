package minicri_test

import (
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/test/harness"
)

// docs/contributors/properties.md has each number once, with a test or the reason for its absence.
// TestPagesNameWhatIsThere checks that the tests exist.
func TestPropertiesNameTests(t *testing.T) {
	rows := tableRows(t, "docs/contributors/properties.md")
	harness.Want(t, len(rows) == 61, "docs/contributors/properties.md has %d rows, the properties are 61", len(rows))
	for i, cells := range rows {
		number := fmt.Sprint(i + 1)
		if len(cells) != 3 || cells[0] != number {
			t.Errorf("row %s of docs/contributors/properties.md is %q", number, cells)
			continue
		}
		held := cells[2]
		_, open := strings.CutPrefix(held, "not held: ")
		named := testName.FindAllString(held, -1)
		harness.Want(t, open != (len(named) > 0) || strings.HasPrefix(held, "not held: make soak runs "),
			"property %s has neither a test nor a reason, or both: %q", number, held)
	}
}

// docs/contributors/workarounds.md gives for each workaround its file, reason, test and end.
func TestWorkaroundsNameTests(t *testing.T) {
	for _, cells := range tableRows(t, "docs/contributors/workarounds.md") {
		if len(cells) != 5 {
			t.Errorf("docs/contributors/workarounds.md: %q does not say what, where, why, which test, and until when", cells)
			continue
		}
		file := regexp.MustCompile("`([^`]+)`").FindStringSubmatch(cells[1])
		if file == nil {
			t.Errorf("%s: it does not say where", cells[0])
		} else if _, err := os.Stat(file[1]); err != nil {
			t.Errorf("%s: %v", cells[0], err)
		}
		named := testName.FindAllString(cells[3], -1)
		harness.Want(t, len(named) > 0 || strings.HasPrefix(cells[3], "none: "), "%s: it names no test", cells[0])
	}
}

// docs/troubleshooting.md has a row for each finding of minicri check: the subjects that its source names,
// and the features of the kernel that it checks. The daemon reports the conditions.
func TestFindingsHaveRows(t *testing.T) {
	rows := map[string]bool{}
	for _, cells := range tableRows(t, "docs/troubleshooting.md") {
		for _, name := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(cells[0], -1) {
			rows[name[1]] = len(cells) == 3
		}
	}
	subjects := map[string]bool{}
	for _, feature := range machine.Features(t.TempDir()) {
		subjects[feature.Name] = true
	}
	files := harness.Glob(t, "internal/doctor/*.go")
	named := regexp.MustCompile(`(?:c\.(?:add|survey|network|fileSystem)\(|c\.when\(.*?\b(?:Problem|Warning), |Subject: )"([^"]+)"`)
	for _, file := range append(files, "cmd/minicri/check.go") {
		source := harness.Read(t, file)
		for _, found := range named.FindAllStringSubmatch(string(source), -1) {
			subjects[found[1]] = true
		}
	}
	for _, known := range []string{"kernel", "root", "network", "pod", "CAP_SYS_RESOURCE", "overlayfs"} {
		harness.Want(t, subjects[known], "this test does not find the subject %q", known)
	}
	for subject := range subjects {
		harness.Want(t, rows[subject], "docs/troubleshooting.md has no row for the finding %q of minicri check", subject)
	}
}

// The legend in docs/troubleshooting.md has each step of pods and containers.
func TestStepsHaveRows(t *testing.T) {
	rows, named := map[string]bool{}, 0
	for _, cells := range tableRows(t, "docs/troubleshooting.md") {
		for name := range strings.SplitSeq(cells[0], ", ") {
			rows[name] = true
		}
	}
	for _, file := range slices.Concat(harness.Glob(t, "sandbox/*.go"), harness.Glob(t, "container/*.go")) {
		for _, found := range regexp.MustCompile(`= "(?:pod|container)/([a-z ]+)"`).FindAllSubmatch(harness.Read(t, file), -1) {
			named++
			harness.Want(t, rows[string(found[1])], "docs/troubleshooting.md has no row for the step %q of %s", found[1], file)
		}
	}
	harness.Want(t, named >= 50, "only %d steps were found", named)
}

// docs/contributors/commands.md names a test for each command of the pages about nodes.
func TestCommandsOfNodesAreRun(t *testing.T) {
	tests, runs := testNames(t), map[string]string{}
	before := ""
	for _, cells := range tableRows(t, "docs/contributors/commands.md") {
		harness.Need(t, len(cells) == 2, "docs/contributors/commands.md: a row has %d cells: %q", len(cells), cells)
		if cells[1] != "the same" && !strings.HasPrefix(cells[1], "the same, ") {
			before = cells[1]
		}
		runs[strings.Trim(cells[0], "`")] = before
	}
	used := map[string]bool{}
	for _, page := range []string{"docs/node.md", "docs/upgrade.md", "docs/kind.md"} {
		for _, command := range commandsOf(t, page) {
			used[command] = true
			named := testName.FindAllString(runs[command], -1)
			harness.Want(t, len(named) > 0, "%s: docs/contributors/commands.md names no test for %q", page, command)
			for _, name := range named {
				harness.Want(t, tests[name], "%s: %q is said to be run by %s, which is not there", page, command, name)
			}
		}
	}
	for command := range runs {
		harness.Want(t, used[command], "docs/contributors/commands.md says what runs %q, which is on no page", command)
	}
}

// commandsOf returns the commands of a page that people run on a node: the indented lines that are no
// configuration, and code spans that begin with a program. Commands of the repository (make test-um) are left out.
func commandsOf(t *testing.T, page string) (commands []string) {
	text := harness.Read(t, page)
	inline := regexp.MustCompile("`((?:make (?:un)?install|systemctl|minicri|kubeadm|crictl|ip|bin/cluster) [^`]+)`")
	text = regexp.MustCompile("(?s)```.*?```").ReplaceAll(text, nil) // which are of TestReadyNode
	for line := range strings.Lines(string(text)) {
		code, isBlock := strings.CutPrefix(strings.TrimRight(line, "\n"), "    ")
		switch {
		case strings.HasPrefix(line, "| "): // the table
		case isBlock && !strings.HasPrefix(code, "[") && !strings.Contains(code, " = "):
			commands = append(commands, code)
		case !isBlock:
			for _, found := range inline.FindAllStringSubmatch(line, -1) {
				commands = append(commands, found[1])
			}
		}
	}
	return commands
}

// ARCHITECTURE.md has every package and every module that they import, and no other.
func TestArchitectureIsCurrent(t *testing.T) {
	text := harness.Read(t, "ARCHITECTURE.md")
	_, rest, _ := strings.Cut(string(text), "## Packages")
	block := strings.Split(rest, "```")[1]
	listed := map[string]bool{}
	for line := range strings.Lines(block) {
		if fields := strings.Fields(line); len(fields) > 1 {
			listed[fields[0]] = true
		}
	}
	for _, p := range everyPackage(t) {
		top, _, _ := strings.Cut(p.name(), "/")
		name := p.name()
		if top == "test" || top == "hack" {
			name = top
		}
		harness.Want(t, listed[name] || name == "" || p.ImportPath == module, "the packages in ARCHITECTURE.md lack %s", name)
	}
	for name := range listed {
		_, err := os.Stat(name)
		harness.Want(t, err == nil, "the packages in ARCHITECTURE.md: %v", err)
	}
	_, table, _ := strings.Cut(string(text), "## Dependencies")
	for dependency := range directModules(t) {
		harness.Want(t, regexp.MustCompile(`[ |(]`+regexp.QuoteMeta(dependency)+`[ ,|]`).MatchString(table),
			"ARCHITECTURE.md does not say what %s is for", dependency)
	}
}

// directModules returns the modules that packages of the daemon and the shim import.
func directModules(t *testing.T) map[string]bool {
	packages, err := list(".", "-deps", "./cmd/...")
	must(t, err)
	moduleOf := map[string]string{}
	for _, p := range packages {
		if p.Module != nil && !p.Module.Main {
			moduleOf[p.ImportPath] = p.Module.Path
		}
	}
	direct := map[string]bool{}
	for _, p := range everyPackage(t) {
		if strings.HasPrefix(p.name(), "test/") && p.name() != "test/leak" || strings.HasPrefix(p.name(), "hack") {
			continue
		}
		for _, imported := range p.Imports {
			if found := moduleOf[imported]; found != "" {
				direct[found] = true
			}
		}
	}
	return direct
}

var testName = regexp.MustCompile(`\b(?:Test|Fuzz)[A-Z]\w*`)

// testNames returns the tests of this repository.
func testNames(t *testing.T) map[string]bool {
	names := map[string]bool{}
	declared := regexp.MustCompile(`(?m)^func ((?:Test|Fuzz)[A-Z]\w*)\(`)
	err := filepath.WalkDir(".", func(file string, entry os.DirEntry, err error) error {
		if err == nil && entry.IsDir() && file == "bin" {
			return filepath.SkipDir
		}
		if err != nil || !strings.HasSuffix(file, "_test.go") {
			return err
		}
		source, err := os.ReadFile(file)
		for _, found := range declared.FindAllSubmatch(source, -1) {
			names[string(found[1])] = true
		}
		return err
	})
	must(t, err)
	return names
}

// tableRows returns the rows of a page's tables without their heads.
func tableRows(t *testing.T, page string) (rows [][]string) {
	text := harness.Read(t, page)
	lines := strings.Split(string(text), "\n")
	for i, line := range lines {
		if !strings.HasPrefix(line, "| ") || strings.HasPrefix(line, "| ---") || i+1 < len(lines) && strings.HasPrefix(lines[i+1], "| ---") {
			continue
		}
		var cells []string
		for cell := range strings.SplitSeq(strings.Trim(line, "| "), " | ") {
			cells = append(cells, strings.TrimSpace(cell))
		}
		rows = append(rows, cells)
	}
	harness.Want(t, len(rows) > 0, "%s has no table", page)
	return rows
}
