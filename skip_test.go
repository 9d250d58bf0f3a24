package minicri_test

import (
	"os"
	"os/exec"
	"regexp"
	"strings"
	"testing"
)

// skips are the files whose tests may be left out, each with its reason. go test
// does not print a skip of a package that passes, so one that is not here would go
// unnoticed.
var skips = map[string]string{
	"namespace/userns_test.go":         "where the next pid cannot be chosen: ns_last_pid needs CAP_SYS_ADMIN and CONFIG_CHECKPOINT_RESTORE",
	"network/runner/runner_test.go":    "where the kernel runs a program that is open for writing: nothing has to be waited for",
	"supervisor/launch/filter_test.go": "this machine may have no AppArmor: make test-um has",
	"test/hostile/stopper_test.go":     "freezer.state is of cgroup v1, memory.high of v2",
	"test/crash/scale_test.go":         "it takes minutes: make test-crash",
}

func TestSkipsAreKnown(t *testing.T) {
	out, err := exec.Command("git", "ls-files", "--cached", "--others", "--exclude-standard", "*.go").Output()
	must(t, err)
	used := make(map[string]bool)
	skip := regexp.MustCompile(`\bt\.Skip(f|Now)?\(`)
	for file := range strings.Lines(string(out)) {
		file = strings.TrimSpace(file)
		source, err := os.ReadFile(file)
		if err != nil || !skip.Match(source) {
			continue // one that git knows may have been removed
		}
		used[file] = true
		if skips[file] == "" {
			t.Errorf("%s skips a test: say why in %s", file, "skip_test.go")
		}
	}
	for file := range skips {
		if !used[file] {
			t.Errorf("%s skips no test: remove it from the list", file)
		}
	}
}
