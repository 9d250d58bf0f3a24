package image

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

// What was unmounted is mounted nowhere at once, and not in use once the store
// is closed: the disk below can be unmounted.
func TestCloseEndsWhatWasUnmounted(t *testing.T) {
	disk, registry := t.TempDir(), newTestRegistry(t)
	if err := unix.Mount("tmpfs", disk, "tmpfs", 0, ""); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Unmount(disk, unix.MNT_DETACH) })
	s, err := Open(t.Context(), Config{Root: disk})
	if err != nil {
		t.Fatal(err)
	}
	image := pull(t, s, registry.push(t, "gone:1", imageOf(t, v1.Config{}, layerOf(t, file("a", "1")))))
	for _, key := range []string{"c1", "c2", "c3", "c4"} {
		if _, _, err := s.Prepare(t.Context(), key, image.ID, PrepareOptions{}); err != nil {
			t.Fatal(err)
		}
		target := filepath.Join(t.TempDir(), "rootfs")
		if err := s.Mount(t.Context(), key, target, ""); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(filepath.Join(target, "written"), make([]byte, 1<<20), 0o644); err != nil {
			t.Error(err)
		}
		if err := s.Unmount(target); err != nil {
			t.Error(err)
		}
		mounts, err := os.ReadFile("/proc/self/mountinfo")
		if err != nil || strings.Contains(string(mounts), target) {
			t.Errorf("%s is still mounted (%v)", target, err)
		}
		if err := s.RemoveSnapshot(t.Context(), key); err != nil {
			t.Error(err)
		}
	}
	if err := s.Close(); err != nil {
		t.Error(err)
	}
	if err := unix.Unmount(disk, 0); err != nil {
		t.Errorf("unmount the disk of a store that is closed: %v", err)
	}
}
