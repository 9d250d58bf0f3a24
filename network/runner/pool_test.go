package runner

import (
	"os"
	"path/filepath"
	"testing"

	"github.com/minicri/minicri/internal/cgroup"
)

// A parent that was not there goes with the runner; one that somebody made stays.
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
