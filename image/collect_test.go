package image

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// TestPrepareBesideCollections makes snapshots while collections run without a
// pause, each with something to remove: what Prepare gave out keeps its
// directories and its record.
func TestPrepareBesideCollections(t *testing.T) {
	const workers, each = 4, 30
	s, registry := openStore(t), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "busy:1", imageOf(t, v1.Config{}, layerOf(t, file("a", "1")), layerOf(t, file("b", "2")))))
	stop, collecting, preparing := make(chan struct{}), sync.WaitGroup{}, sync.WaitGroup{}
	collecting.Go(func() { removeAndCollect(t, s, image, stop) })
	for worker := range workers {
		preparing.Go(func() {
			for i := range each {
				if _, _, err := s.Prepare(t.Context(), fmt.Sprintf("%d-%d", worker, i), image.ID, PrepareOptions{}); err != nil {
					t.Error(err)
				}
			}
		})
	}
	preparing.Wait()
	close(stop)
	collecting.Wait()
	if l := collected(t, s); l.snapshots != 2+workers*each {
		t.Errorf("left: %+v, want two layers and %d containers", l, workers*each)
	}
	keys, err := s.Snapshots(t.Context())
	if err != nil || len(keys) != workers*each {
		t.Errorf("%d containers: %v", len(keys), err)
	}
	for _, key := range keys {
		checkMountable(t, s, key)
	}
}

// removeAndCollect makes and removes a snapshot before each collection, which
// without a removal would look at no layers.
func removeAndCollect(t *testing.T, s *Store, image Image, stop <-chan struct{}) {
	for {
		if _, _, err := s.Prepare(t.Context(), "removed", image.ID, PrepareOptions{}); err != nil {
			t.Error(err)
		}
		if err := s.RemoveSnapshot(t.Context(), "removed"); err != nil {
			t.Error(err)
		}
		if err := s.Collect(t.Context()); err != nil {
			t.Error(err)
		}
		select {
		case <-stop:
			return
		default:
		}
	}
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
	if err := s.Unmount(target); err != nil {
		t.Error(err)
	}
}
