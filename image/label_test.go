package image

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/containerd/containerd/v2/core/mount"
	"golang.org/x/sys/unix"
)

// An overlay shows of a single layer what the bind of it does, and cannot be written
// to. The label itself is TestSELinuxOfImageVolumes of test/container.
func TestOverlayOfABoundLayer(t *testing.T) {
	layer, empty, target := t.TempDir(), t.TempDir(), t.TempDir()
	must(t, os.WriteFile(filepath.Join(layer, "file"), []byte("content"), 0o640))
	must(t, os.Chmod(layer, 0o711))
	bind := mount.Mount{Type: "bind", Source: layer, Options: []string{"ro", "rbind"}}
	must(t, mount.All([]mount.Mount{overlayOf(bind, empty)}, target))
	t.Cleanup(func() {
		report(t, unix.Unmount(target, 0))
	})
	info, err := os.Stat(target)
	if err != nil || info.Mode().Perm() != 0o711 {
		t.Errorf("the directory is %v, %v", info, err)
	}
	if content, err := os.ReadFile(filepath.Join(target, "file")); err != nil || string(content) != "content" {
		t.Errorf("%q, %v", content, err)
	}
	if err := os.WriteFile(filepath.Join(target, "new"), nil, 0o600); !errors.Is(err, unix.EROFS) {
		t.Errorf("writing: %v", err)
	}
}
