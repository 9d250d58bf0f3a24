package image

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/plugins/content/local"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/minicri/minicri/internal/tree"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

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
