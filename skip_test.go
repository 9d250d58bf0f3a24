package minicri_test

import (
	"os"
	"os/exec"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// skips are the files whose tests may be left out, with the reason of each call that does it. go test does not
// print a skip of a package that passes, so one that is not here would go unnoticed.
var skips = map[string][]string{
	"namespace/userns_test.go": {"where the next pid cannot be chosen: ns_last_pid needs CAP_SYS_ADMIN and CONFIG_CHECKPOINT_RESTORE"},
	"network/runner/runner_test.go": {
		"where no hierarchy of cgroup v1 has the controller of pids: with version 2 it is not in a cgroup of its own",
		"where the kernel runs a program that is open for writing: nothing has to be waited for",
	},
	"supervisor/launch/filter_test.go": {"this machine may have no AppArmor: make test-um has"},
	"test/hostile/stopper_test.go":     {"freezer.state is of cgroup v1", "memory.high is of cgroup v2"},
	"test/crash/scale_test.go":         slices.Repeat([]string{"it takes minutes: make test-crash"}, 3),
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
		harness.Want(t, calls[file] == len(skips[file]), "%s skips tests in %d places: say why of each in skip_test.go", file, calls[file])
	}
	for file := range skips {
		harness.Want(t, calls[file] != 0, "%s skips no test: remove it from the list", file)
	}
}
