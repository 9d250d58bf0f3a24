package image

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// TestSnapshotWithTheNumberOfAFailedOne makes a snapshot while directories are
// deleted, with the number that one had whose record a full disk did not take:
// its directory was there when the sweep began, and was removed since.
func TestSnapshotWithTheNumberOfAFailedOne(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "failed:1", imageOf(t, v1.Config{}, layerOf(t, file("a", "1")), layerOf(t, file("b", "2")))))
	collected(t, s)
	must(t, s.Prepare(t.Context(), "newest", image.ID, PrepareOptions{}))
	failed := filepath.Join(s.dir, snapshotterKey, "snapshots", strconv.Itoa(numberOfNewest(t, s)+1))
	must(t, os.MkdirAll(filepath.Join(failed, "fs"), 0o700))
	deleting := waste(t, filepath.Dir(failed))
	swept := make(chan error, 1)
	go func() { swept <- s.overlay.sweep(s.scope(t.Context())) }()
	for !deleting() {
		time.Sleep(100 * time.Microsecond)
	}
	must(t, os.RemoveAll(failed))
	must(t, s.Prepare(t.Context(), "next", image.ID, PrepareOptions{}))
	report(t, <-swept)
	checkMountable(t, s, "next")
	if newest := numberOfNewest(t, s); strconv.Itoa(newest) != filepath.Base(failed) {
		t.Errorf("the snapshot has number %d and not that of %s: nothing was shown", newest, failed)
	}
}

// numberOfNewest is the number of the newest snapshot.
func numberOfNewest(t *testing.T, s *Store) (newest int) {
	t.Helper()
	all, err := os.ReadDir(filepath.Join(s.dir, snapshotterKey, "snapshots"))
	must(t, err)
	for _, entry := range all {
		if number, err := strconv.Atoi(entry.Name()); err == nil {
			newest = max(newest, number)
		}
	}
	return newest
}

// waste makes directories that no record knows, of so many files that to delete
// them takes a while. deleting reports whether that has begun.
func waste(t *testing.T, dir string) (deleting func() bool) {
	t.Helper()
	const directories, files = 10, 100
	left := func() (n int) {
		for i := range directories {
			entries, err := os.ReadDir(filepath.Join(dir, fmt.Sprintf("waste-%d", i)))
			if err == nil {
				n += len(entries)
			}
		}
		return n
	}
	for i := range directories * files {
		path := filepath.Join(dir, fmt.Sprintf("waste-%d", i%directories))
		must(t, errors.Join(os.MkdirAll(path, 0o700), os.WriteFile(filepath.Join(path, strconv.Itoa(i)), nil, 0o600)))
	}
	return func() bool { return left() < directories*files }
}

// checkMountable mounts a snapshot and looks for what the image has in it.
func checkMountable(t *testing.T, s *Store, key string) {
	t.Helper()
	target := filepath.Join(t.TempDir(), key)
	if err := s.Mount(t.Context(), key, target, ""); err != nil {
		t.Error(err)
		return
	}
	for _, name := range []string{"a", "b"} {
		if _, err := os.Stat(filepath.Join(target, name)); err != nil {
			t.Error(err)
		}
	}
	report(t, s.Unmount(target))
}
