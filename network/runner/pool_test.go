package runner

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/minicri/minicri/internal/cgroup"
)

// A parent that was not there goes with the runner; one that was there stays.
func TestCloseRemovesTheParentThatItMade(t *testing.T) {
	for _, there := range []bool{false, true} {
		parent, err := cgroup.GroupParent("/minicri-unit-pool-" + filepath.Base(t.TempDir()) + t.Name())
		must(t, err)
		if there {
			must(t, parent.Make())
		}
		t.Cleanup(func() { must(t, parent.Remove()) })
		r, err := Open(Options{Dir: t.TempDir(), Program: filepath.Join(t.TempDir(), "runner"), Parent: parent, Mark: "unit-"})
		must(t, err)
		_, _, err = r.Runs()
		must(t, err)
		if _, err := os.Stat(parent.Dir); err != nil {
			t.Fatal(err)
		}
		must(t, r.Close())
		if _, err := os.Stat(parent.Dir); os.IsNotExist(err) == there {
			t.Errorf("a parent that was there before: %v; afterwards: %v", there, err)
		}
	}
}

// Without a mark all cgroups of the machine that are empty would be those of
// runs, and go.
func TestOpenNeedsAMark(t *testing.T) {
	dir := filepath.Join(t.TempDir(), "runs")
	r, err := Open(Options{Dir: dir, Program: filepath.Join(t.TempDir(), "runner")})
	if err == nil {
		t.Error("opened without a mark")
		must(t, r.Close())
	}
	if _, err := os.Stat(dir); !os.IsNotExist(err) {
		t.Errorf("the directory of runs was made: %v", err)
	}
}

// The links are made once, also when they were removed by hand, and those of an
// earlier daemon with another program are replaced.
func TestLinksAreSharedByRuns(t *testing.T) {
	eachVersion(t, map[string]string{"ok": "echo ok"}, func(t *testing.T, r *Runner) {
		check := func(r *Runner, name string) {
			t.Helper()
			run := begin(t, r, "ADD", name, "..")
			if stdout, _, err := call(t, run, name, ""); (err == nil) != (name == "ok") {
				t.Errorf("%s: %q, %v", name, stdout, err)
			}
			if to, err := os.Readlink(filepath.Join(run.PluginDir(), name)); err != nil || to != r.options.Program {
				t.Errorf("%s is a link to %q, %v", name, to, err)
			}
		}
		check(r, "ok")
		check(r, "missing")
		must(t, os.RemoveAll(r.pluginsDir()))
		check(r, "ok")
		must(t, os.Remove(filepath.Join(r.pluginsDir(), "ok")))
		check(r, "ok")
		other := r.options
		other.Program = filepath.Join(t.TempDir(), "other")
		next, err := Open(other)
		must(t, err)
		check(next, "ok")
	})
}
