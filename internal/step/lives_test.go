package step_test

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/test/harness"
)

func open(t *testing.T, directory string) *step.Lives {
	lives, err := step.OpenLives(directory)
	harness.Check(t, err)
	return lives
}

// life is one that ended i milliseconds after the first.
func life(i int, failure string) step.Life {
	return step.Life{
		Kind: "pod", ID: fmt.Sprintf("%064x", i), Name: "default/web", End: time.UnixMilli(1_700_000_000_000 + int64(i)), Error: failure,
		Rows: []step.Row{{Kind: "pod", Step: "record"}, {Kind: "plugin", Step: "bridge ADD", Parent: "cni add", Took: time.Second}},
	}
}

// Lives are found after a restart, the newest first, by id and by its beginning.
func TestLivesAreKeptOverRestarts(t *testing.T) {
	directory := filepath.Join(t.TempDir(), "lives")
	lives := open(t, directory)
	harness.Check(t, lives.Keep(life(1, "")))
	harness.Check(t, lives.Keep(life(0x20, "cni add: no address")))
	harness.Check(t, os.WriteFile(filepath.Join(directory, ".new-cut-off"), []byte("{"), 0o600))
	harness.Check(t, os.WriteFile(filepath.Join(directory, "1-ok-pod-garbage.json"), []byte("{"), 0o600))

	lives = open(t, directory)
	harness.Check(t, lives.Keep(life(0x30, "")))
	list, err := lives.List()
	harness.Check(t, err)
	harness.Want(t, len(list) == 3 && list[0].ID == life(0x30, "").ID && list[1].Error == "cni add: no address" && len(list[2].Rows) == 2,
		"got %+v", list)
	found, err := lives.Get(life(0x20, "").ID[:63])
	harness.Check(t, err)
	harness.Want(t, len(found) == 1 && found[0].ID == life(0x20, "").ID && found[0].Rows[1] == life(0x20, "").Rows[1], "found %+v", found)
	_, err = os.Stat(filepath.Join(directory, ".new-cut-off"))
	harness.Want(t, errors.Is(err, os.ErrNotExist), "what a crash left of a write: %v", err)
}

// A sandbox that failed, could not be destroyed, and was removed later, has one.
func TestLifeOfAnIDIsReplaced(t *testing.T) {
	lives := open(t, t.TempDir())
	first := life(1, "failed")
	harness.Check(t, lives.Keep(first))
	first.End = first.End.Add(time.Hour)
	harness.Check(t, lives.Keep(first))
	list, err := lives.List()
	harness.Check(t, err)
	harness.Want(t, len(list) == 1 && list[0].End.Equal(first.End), "got %+v", list)
}

// The last 1000 are kept, and those that failed longer than those that did not. They take at most 8 MiB of the disk.
func TestLivesAreBounded(t *testing.T) {
	directory := t.TempDir()
	lives := open(t, directory)
	for i := range 1500 {
		failure := ""
		if i < 100 {
			failure = "it failed long ago"
		}
		l := life(i, failure)
		for range 100 {
			l.Rows = append(l.Rows, step.Row{Kind: "pod", Step: "cni del", Error: strings.Repeat("e", 500)})
		}
		harness.Check(t, lives.Keep(l))
	}
	list, err := lives.List()
	harness.Check(t, err)
	failures := 0
	for _, l := range list {
		if l.Error != "" {
			failures++
		}
	}
	harness.Want(t, len(list) == 1000 && failures == 100 && list[0].ID == life(1499, "").ID,
		"%d are kept, %d of them failed", len(list), failures)
	used := disk(t, directory)
	harness.Want(t, used <= 8<<20, "they take %d bytes of the disk", used)
}

func disk(t *testing.T, directory string) (bytes int64) {
	entries, err := os.ReadDir(directory)
	harness.Check(t, err)
	for _, entry := range entries {
		info, err := entry.Info()
		harness.Check(t, err)
		bytes += info.Sys().(*syscall.Stat_t).Blocks * 512
	}
	return bytes
}

// What is no file in the place of a life is skipped, and does not block.
func TestWhatIsNoFileIsNoLife(t *testing.T) {
	dir := t.TempDir()
	kept := open(t, dir)
	harness.Check(t, kept.Keep(step.Life{Kind: "pod", ID: "good", Name: "test/web", End: time.Now()}))
	names := func(i int) string {
		return filepath.Join(dir, fmt.Sprintf("%019d-failed-pod-bad%d-00000000.json", i, i))
	}
	harness.Check(t, errors.Join(syscall.Mkfifo(names(1), 0o600), os.Symlink("/dev/zero", names(2)), os.Mkdir(names(3), 0o700), os.WriteFile(names(4), []byte("{"), 0o600)))
	lives, err := kept.List()
	harness.Want(t, err == nil && len(lives) == 1 && lives[0].ID == "good", "%+v, %v", lives, err)
}
