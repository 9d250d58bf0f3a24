package image

import (
	"errors"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// TestPulledImageSurvivesAPowerCut keeps the store on a filesystem of its own in a file and, the moment Pull
// returned, copies that file: the copy is what a machine without power would find on its disk.
func TestPulledImageSurvivesAPowerCut(t *testing.T) {
	registry := newTestRegistry(t)
	img := imageOf(t, v1.Config{}, layerOf(t, noise("a", 1<<20, 1)), layerOf(t, noise("b", 1<<20, 2)), layerOf(t, manyFiles(400)...))
	reference := registry.push(t, "power:1", img)
	root, disk := newDisk(t, "96M")
	pull(t, openStoreAt(t, root), reference)
	copied, after := filepath.Join(t.TempDir(), "copy"), filepath.Join(t.TempDir(), "after")
	run(t, "cp", "--sparse=always", disk, copied)
	mountDisk(t, copied, after, "loop")
	s := openStoreAt(t, after)
	image, err := s.Get(reference)
	must(t, err)
	target := mountImage(t, s, image)
	checkContent(t, target)
	checkFile(t, filepath.Join(target, "many", "399"), strings.Repeat("x", 100))
}

// TestFullDiskIsReportedAndRecoveredFrom pulls what fits by all that is known before its download, and then does not:
// another process fills the disk meanwhile, or it is larger unpacked. After that it pulls what the disk does hold.
func TestFullDiskIsReportedAndRecoveredFrom(t *testing.T) {
	registry := newTestRegistry(t)
	layer := layerOf(t, noise("a", 12<<20, 1))
	large := registry.push(t, "large:1", imageOf(t, v1.Config{}, layer))
	small := registry.push(t, "small:1", smallImage(t))
	for title, filled := range map[string]bool{"download": true, "unpack": false} {
		t.Run(title, func(t *testing.T) {
			root, _ := newDisk(t, "20M")
			s, other := openStoreAt(t, root), filepath.Join(root, "other")
			registry.breakWith(onBlob(digestOf(t, layer), func(http.ResponseWriter, *http.Request, http.Handler) bool {
				if filled {
					run(t, "fallocate", "-l", "12M", other)
				}
				return false
			}))
			_, err := s.Pull(t.Context(), large, Auth{}, nil)
			registry.breakWith(nil)
			harness.Want(t, errdefs.IsResourceExhausted(err) && errors.Is(err, unix.ENOSPC) == filled, "error: %v", err)
			if filled {
				run(t, "rm", other)
			}
			checkLeft(t, s, leftovers{})
			pull(t, s, small)
		})
	}
}

// TestStartOnAFullDisk: where there is no room for a file, nor for a longer name, the store opens, deletes the
// directories that no record knows, and leaves no files of a comparison with the disk.
func TestStartOnAFullDisk(t *testing.T) {
	root, _ := newDisk(t, "16M")
	s, other := openStoreAt(t, root), filepath.Join(root, "other")
	fillAndCollect := func(directory string) {
		_ = exec.Command("dd", "if=/dev/zero", "of="+other, "bs=1k").Run() // ends without room
		run(t, "truncate", "-s", "-4k", other)
		must(t, s.Close())
		s = openStoreAt(t, root)
		must(t, s.Collect(t.Context()))
		left, err := os.ReadDir(directory)
		harness.Want(t, len(left) == 0 && err == nil, "in %s is left: %v (%v)", directory, left, err)
	}
	fillAndCollect(filepath.Join(s.dir, "content", "ingest"))
	must(t, os.Remove(other))
	for i := range 300 {
		must(t, os.Mkdir(filepath.Join(LayersDir(root), strconv.Itoa(i)), 0o700))
	}
	fillAndCollect(LayersDir(root))
}

// attack: registries: three layers of which each would fit on the disk, and all together would not
// held: refused with the sum before any layer is asked for; what is on the node already does not count
// field: containerd and CRI-O fill the disk and fail then
func TestLayersThatDoNotFitTogether(t *testing.T) {
	registry := newTestRegistry(t)
	a, b, c := layerOf(t, noise("a", 4<<20, 1)), layerOf(t, noise("b", 10<<20, 2)), layerOf(t, noise("c", 10<<20, 3))
	first := registry.push(t, "first:1", imageOf(t, v1.Config{}, a))
	all := registry.push(t, "all:1", imageOf(t, v1.Config{}, a, b, c))
	root, _ := newDisk(t, "24M")
	s := openStoreAt(t, root)
	pull(t, s, first)
	checkLeft(t, s, leftovers{blobs: 2, snapshots: 1, records: 1}) // a manifest and a configuration
	checkRefused(t, s, all, Auth{}, errdefs.IsResourceExhausted, "bytes are needed for its layers")
	for _, layer := range []v1.Layer{b, c} {
		harness.Same(t, "a layer was fetched", registry.blobGets(digestOf(t, layer)), nil)
	}
	harness.Same(t, "requests for the layer that is on the node", len(registry.blobGets(digestOf(t, a))), 1)
}

// newDisk makes a filesystem in a file and mounts it. Its journal is not written
// until someone asks, so that only what was asked for is on the disk.
func newDisk(t *testing.T, size string) (root, disk string) {
	disk = filepath.Join(t.TempDir(), "disk")
	run(t, "truncate", "-s", size, disk)
	run(t, "mkfs.ext4", "-q", disk)
	root = filepath.Join(t.TempDir(), "root")
	mountDisk(t, disk, root, "loop,commit=300")
	return root, disk
}

func mountDisk(t *testing.T, disk, root, options string) {
	must(t, os.Mkdir(root, 0o755))
	run(t, "mount", "-o", options, disk, root)
	t.Cleanup(func() { unmountDisk(t, root) })
}

// unmountDisk collects Go's garbage first: containerd's check for fs-verity leaves a file open
// until then. A process that looks at all mounts of the machine holds each for a moment.
func unmountDisk(t *testing.T, root string) {
	harness.Eventually(t, "the disk is unmounted", time.Minute, func() bool { runtime.GC(); return unix.Unmount(root, 0) == nil })
}

func run(t *testing.T, name string, args ...string) {
	out, err := exec.Command(name, args...).CombinedOutput()
	harness.Need(t, err == nil, "%s %v: %v: %s", name, args, err, out)
}
