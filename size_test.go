package minicri_test

import (
	"go/ast"
	"go/token"
	"math"
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// Functions fit on a screen, and files are about one thing (CONTRIBUTING.md). Tests
// are left out: a table of cases may be long.
func TestFunctionsFitOnAScreen(t *testing.T) {
	const longestFunction, longestFile = 60, 500
	looked := 0
	eachFile(t, func(file string, files *token.FileSet, parsed *ast.File) {
		line := func(at token.Pos) int { return files.Position(at).Line }
		lines := files.File(parsed.Pos()).LineCount()
		harness.Want(t, lines <= longestFile, "%s has %d lines, %d at most: what is a file of its own?", file, lines, longestFile)
		for _, declaration := range parsed.Decls {
			if function, is := declaration.(*ast.FuncDecl); is {
				looked++
				lines := line(function.End()) - line(function.Pos()) + 1
				harness.Want(t, lines <= longestFunction, "%s: %s has %d lines, %d at most: name its parts", file, function.Name.Name, lines, longestFunction)
			}
		}
	})
	harness.Want(t, looked >= 1000, "%d functions were looked at", looked)
}

// What README and ARCHITECTURE say of the number of lines is so, within a tenth.
func TestNumbersOfLines(t *testing.T) {
	readme := submatches(t, "README.md", `\(([^()]*)\) has ([0-9,]+) of ([0-9,]+) lines`)
	var packages []string
	for _, found := range regexp.MustCompile("`([^`]+)`").FindAllStringSubmatch(readme[1], -1) {
		packages = append(packages, found[1])
	}
	half := 0
	for _, lines := range size(t, packages...) {
		harness.Want(t, lines != 0, "README.md names a package without lines: one of %v", packages)
		half += lines
	}
	whole := size(t)
	wantLines(t, "README.md, half of a pod's life", readme[2], half)
	wantLines(t, "README.md, the product", readme[3], whole[0])
	architecture := submatches(t, "ARCHITECTURE.md", "`make size` counts ([0-9,]+) lines .*, and ([0-9,]+) of tests")
	wantLines(t, "ARCHITECTURE.md, the product", architecture[1], whole[0])
	wantLines(t, "ARCHITECTURE.md, tests", architecture[2], whole[1])
}

// size are the numbers that hack/size prints.
func size(t *testing.T, directories ...string) (lines []int) {
	out, err := exec.Command("hack/size", directories...).Output()
	must(t, err)
	for _, number := range regexp.MustCompile(`(?m) ([0-9]+)( lines)?$`).FindAllStringSubmatch(string(out), -1) {
		count, err := strconv.Atoi(number[1])
		must(t, err)
		lines = append(lines, count)
	}
	return lines
}

func submatches(t *testing.T, file, pattern string) []string {
	text := harness.Read(t, file)
	found := regexp.MustCompile(pattern).FindStringSubmatch(string(text))
	harness.Need(t, found != nil, "%s has no %q", file, pattern)
	return found
}

func wantLines(t *testing.T, what, says string, is int) {
	said, err := strconv.Atoi(strings.ReplaceAll(says, ",", ""))
	must(t, err)
	harness.Want(t, math.Abs(float64(said-is)) <= float64(is)/10, "%s: it says %d lines, there are %d: make size", what, said, is)
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
