package image

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/tree"
	"github.com/minicri/minicri/test/harness"
)

const (
	childRoot      = "MINICRI_TEST_PULL_ROOT"
	childReference = "MINICRI_TEST_PULL_REFERENCE"
)

// pullAsChild is the process that TestKilledPulls kills.
func pullAsChild() int {
	s, err := Open(context.Background(), Config{Root: os.Getenv(childRoot), CollectDelay: time.Millisecond})
	if err == nil {
		_, err = s.Pull(context.Background(), os.Getenv(childReference), Auth{}, nil)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

// killer counts the bytes that a registry sends and kills the child when it has sent so many.
type killer struct {
	http.ResponseWriter
	left  *atomic.Int64
	child *atomic.Pointer[os.Process]
}

func (k killer) Write(p []byte) (int, error) {
	if left := k.left.Add(-int64(len(p))); left < 0 {
		send := max(0, len(p)+int(left))
		n, _ := k.ResponseWriter.Write(p[:send])
		k.ResponseWriter.(http.Flusher).Flush()
		if child := k.child.Load(); child != nil {
			_ = child.Signal(syscall.SIGKILL)
		}
		return n, syscall.EPIPE
	}
	return k.ResponseWriter.Write(p)
}

// TestKilledPulls kills a pull at bytes spread over the whole transfer and at moments spread over the unpacking
// after the last byte, on one store. After each kill the image is complete or not there; at the end a pull succeeds
// and nothing is left but the image.
func TestKilledPulls(t *testing.T) {
	registry, root := newTestRegistry(t), t.TempDir()
	img := imageOf(t, v1.Config{}, layerOf(t, noise("a", 1<<20, 1), file("x", "1")), layerOf(t, noise("b", 1<<20, 2)), layerOf(t, manyFiles(400)...))
	reference := registry.push(t, "kill:1", img)
	want := 3<<20 - 1<<20 // bytes of the two layers that do not compress
	for i := range 14 {
		killOne(t, registry, root, reference, int64(want*i/12), 0)
		checkAfterKill(t, root, reference)
	}
	for i := range 8 {
		killOne(t, registry, root, reference, 1<<40, time.Duration(20+12*i)*time.Millisecond)
		checkAfterKill(t, root, reference)
	}
	s := openStoreAt(t, root)
	image := pull(t, s, reference)
	checkContent(t, mountImage(t, s, image))
	checkLeft(t, s, leftovers{blobs: 2, snapshots: 4, records: 1}) // three layers and the mounted one
}

// TestCollectRemovesWhatTheDatabaseDoesNotKnow leaves on the disk what a daemon
// does that is killed between the disk and the database.
func TestCollectRemovesWhatTheDatabaseDoesNotKnow(t *testing.T) {
	s := openStore(t)
	ctx := s.scope(t.Context())
	_, err := s.overlay.Prepare(ctx, "minicri/1/unknown", "")
	must(t, errors.Join(err, s.Close()))
	blobs, err := local.NewStore(filepath.Join(s.dir, "content"))
	must(t, err)
	desc := ocispec.Descriptor{Digest: digest.FromString("unknown"), Size: int64(len("unknown"))}
	must(t, content.WriteBlob(ctx, blobs, "whole", strings.NewReader("unknown"), desc))
	half, err := blobs.Writer(ctx, content.WithRef("half"))
	must(t, err)
	must(t, half.Close())
	mkdir(t, filepath.Join(s.dir, "content", "ingest", "hardly-begun"))
	checkLeft(t, reopened(t, s), leftovers{})
}

// TestComparisonsThatAreCut: none writes what one before it has left on the disk. The library would make a record of
// that blob, and a kill before it is removed would keep both for a day.
func TestComparisonsThatAreCut(t *testing.T) {
	s := openStore(t)
	for n := 1; n <= 2; n++ {
		must(t, s.compareDisk(s.scope(t.Context())))
		harness.Same(t, "blobs before a collection", files(t, filepath.Join(s.dir, "content", "blobs")), n)
	}
	checkLeft(t, reopened(t, s), leftovers{})
}

// TestPullAfterAKillBetweenASnapshotAndItsRecord leaves the directory that a daemon leaves which is killed after the
// rename that makes snapshot N and before the record of N is on the disk: the next snapshot has the same number.
func TestPullAfterAKillBetweenASnapshotAndItsRecord(t *testing.T) {
	registry := newTestRegistry(t)
	reference := registry.push(t, "half:1", smallImage(t))
	for title, before := range map[string]int{"the first snapshot": 0, "a later one": 3} {
		t.Run(title, func(t *testing.T) {
			root := t.TempDir()
			for i := range before {
				pullAndPrepare(t, root, reference, fmt.Sprint("before ", i))
			}
			all := filepath.Join(root, "image", "overlayfs", "snapshots")
			half := filepath.Join(all, fmt.Sprint(entries(t, all)+1))
			mkdir(t, filepath.Join(half, "fs"))
			mkdir(t, filepath.Join(half, "work"))
			pullAndPrepare(t, root, reference, "after")
			s := openStoreAt(t, root)
			checkFile(t, filepath.Join(mountImage(t, s, pull(t, s, reference)), "a"), "1")
			checkLeft(t, s, leftovers{blobs: 2, snapshots: 1 + before + 2, records: 1}) // the layer, a container of each store, the mounted one
		})
	}
}

// TestSnapshotWithTheNumberOfAFailedOne makes a snapshot while directories are deleted,
// with the number that one had whose record a full disk did not take.
func TestSnapshotWithTheNumberOfAFailedOne(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "failed:1", smallImage(t)))
	collected(t, s)
	must(t, s.Prepare(t.Context(), "newest", image.ID, PrepareOptions{}))
	all := filepath.Join(s.dir, snapshotterKey, "snapshots")
	there, err := os.ReadDir(all)
	must(t, err)
	newest, err := strconv.Atoi(there[len(there)-1].Name())
	must(t, err)
	failed := filepath.Join(all, strconv.Itoa(newest+1))
	mkdir(t, filepath.Join(failed, "fs"))
	paths, err := s.overlay.setAside(s.scope(t.Context()))
	must(t, err)
	must(t, s.Prepare(t.Context(), "next", image.ID, PrepareOptions{}))
	_, err = os.Stat(failed)
	harness.Want(t, err == nil && len(paths) == 1, "the snapshot has another number, nothing was shown: %v, %q", err, paths)
	for _, path := range paths {
		must(t, tree.Remove(path))
	}
	target := filepath.Join(t.TempDir(), "next")
	must(t, s.Mount(t.Context(), "next", target, ""))
	checkFile(t, filepath.Join(target, "a"), "1")
	must(t, s.Unmount(target))
}

// pullAndPrepare is the life of a store that ends before its first collection.
func pullAndPrepare(t *testing.T, root, reference, key string) {
	s, err := Open(t.Context(), Config{Root: root, CollectDelay: time.Hour})
	must(t, err)
	defer s.Close()
	image := pull(t, s, reference)
	must(t, s.Prepare(t.Context(), key, image.ID, PrepareOptions{}))
}

func manyFiles(n int) (all []entry) {
	for i := range n {
		all = append(all, file(fmt.Sprintf("many/%d", i), strings.Repeat("x", 100)))
	}
	return all
}

// killOne ends a child after so many bytes, or after so much time.
func killOne(t *testing.T, registry *testRegistry, root, reference string, bytes int64, after time.Duration) {
	var left atomic.Int64
	var process atomic.Pointer[os.Process]
	left.Store(bytes)
	registry.breakWith(func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		origin.ServeHTTP(killer{w, &left, &process}, r)
		return true
	})
	defer registry.breakWith(nil)
	child := exec.Command(os.Args[0])
	child.Env = append(os.Environ(), childRoot+"="+root, childReference+"="+reference)
	must(t, child.Start())
	process.Store(child.Process)
	if after > 0 {
		timer := time.AfterFunc(after, func() { _ = child.Process.Signal(syscall.SIGKILL) })
		defer timer.Stop()
	}
	_ = child.Wait() // killed, or done before the kill came
}

// checkAfterKill opens the store as a new daemon does. What is listed must be whole. It closes at once, most often
// before the collection, so that the next child meets what this one left.
func checkAfterKill(t *testing.T, root, reference string) {
	s, err := Open(t.Context(), Config{Root: root, CollectDelay: time.Hour})
	must(t, err)
	defer s.Close()
	for _, image := range s.List() {
		target := mountAs(t, s, "check", image, PrepareOptions{})
		checkContent(t, target)
		must(t, s.Unmount(target))
		must(t, s.RemoveSnapshot(t.Context(), "check"))
		must(t, s.Remove(t.Context(), reference))
	}
}

func checkContent(t *testing.T, root string) {
	for name, want := range map[string][]byte{"a": noise("a", 1<<20, 1).data, "b": noise("b", 1<<20, 2).data} {
		data, err := os.ReadFile(filepath.Join(root, name))
		harness.Want(t, err == nil && string(data) == string(want), "%s: %d bytes differ from what was pushed (%v)", name, len(data), err)
	}
	harness.Same(t, "files in many", entries(t, filepath.Join(root, "many")), 400)
}

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

// attack: registries: each of three layers fits on the disk, all together do not
// held: it is refused with the sum before any layer is requested; layers on the node do not count
// field: containerd and CRI-O fill the disk, then fail
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
	harness.Eventually(t, "the disk is unmounted", func() bool { runtime.GC(); return unix.Unmount(root, 0) == nil })
}

func run(t *testing.T, name string, args ...string) {
	out, err := exec.Command(name, args...).CombinedOutput()
	harness.Need(t, err == nil, "%s %v: %v: %s", name, args, err, out)
}
