package image

import (
	"context"
	"errors"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/snapshots"

	"github.com/minicri/minicri/test/harness"
)

func nodePlatformArch() string { return runtime.GOARCH }

// openStore opens a store in a directory of the test, with a collection that runs only when the test asks.
func openStore(t testing.TB, change ...func(*Config)) *Store {
	return openStoreAt(t, t.TempDir(), change...)
}

func openStoreAt(t testing.TB, root string, change ...func(*Config)) *Store {
	harness.Want(t, os.Getuid() == 0, "the tests of image mount overlays: run them as root")
	config := Config{Root: root, CollectDelay: time.Hour, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	for _, f := range change {
		f(&config)
	}
	s, err := Open(t.Context(), config)
	must(t, err)
	t.Cleanup(func() { must(t, s.Close()) })
	return s
}

// reopened is the store as the next daemon opens it.
func reopened(t testing.TB, s *Store, change ...func(*Config)) *Store {
	must(t, s.Close())
	return openStoreAt(t, filepath.Dir(s.dir), change...)
}

func pull(t testing.TB, s *Store, reference string) Image {
	image, err := s.Pull(t.Context(), reference, Auth{}, nil)
	must(t, err)
	return image
}

// mountImage prepares and mounts a snapshot of an image and returns the path.
func mountImage(t testing.TB, s *Store, image Image) string {
	key := filepath.Base(t.TempDir()) + image.ID
	target := mountAs(t, s, key, image, PrepareOptions{})
	t.Cleanup(func() { must(t, errors.Join(s.Unmount(target), s.RemoveSnapshot(context.Background(), key))) })
	return target
}

// mountAs is mountImage under a name of the test's, which is left to it.
func mountAs(t testing.TB, s *Store, key string, image Image, options PrepareOptions) (target string) {
	must(t, s.Prepare(t.Context(), key, image.ID, options))
	target = filepath.Join(t.TempDir(), "rootfs")
	must(t, s.Mount(t.Context(), key, target, ""))
	return target
}

func checkFile(t testing.TB, path, want string) {
	data, err := os.ReadFile(path)
	harness.Want(t, err == nil && string(data) == want, "%q holds %q, want %q: %v", path, data, want, err)
}

// checkLeft runs a collection and compares what is left.
func checkLeft(t testing.TB, s *Store, want leftovers) {
	harness.Same(t, "left", collected(t, s), want)
}

// leftovers is what is on the disk of a store: blobs, ingests and snapshot directories.
type leftovers struct{ blobs, ingests, snapshots, records int }

// collected runs a collection and counts what is left.
func collected(t testing.TB, s *Store) leftovers {
	must(t, s.Collect(t.Context()))
	l := leftovers{
		blobs: files(t, filepath.Join(s.dir, "content", "blobs")), ingests: entries(t, filepath.Join(s.dir, "content", "ingest")),
		snapshots: entries(t, filepath.Join(s.dir, "overlayfs", "snapshots")), records: len(s.List()),
	}
	checkDatabase(t, s, l)
	return l
}

// checkDatabase demands that the database knows exactly what is on the disk.
func checkDatabase(t testing.TB, s *Store, l leftovers) {
	ctx, known := s.scope(t.Context()), leftovers{}
	err := s.content.Walk(ctx, func(content.Info) error { known.blobs++; return nil })
	must(t, err)
	err = s.snapshots.Walk(ctx, func(context.Context, snapshots.Info) error { known.snapshots++; return nil })
	must(t, err)
	harness.Want(t, known.blobs == l.blobs && known.snapshots == l.snapshots, "database knows %+v, on disk are %+v", known, l)
}

func files(t testing.TB, root string) (n int) {
	err := filepath.WalkDir(root, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			n++
		}
		return err
	})
	harness.Want(t, err == nil || os.IsNotExist(err), "%v", err)
	return n
}

func entries(t testing.TB, dir string) int {
	all, err := os.ReadDir(dir)
	harness.Want(t, err == nil || os.IsNotExist(err), "%v", err)
	return len(all)
}

func TestCollectionOfANewStore(t *testing.T) {
	checkLeft(t, openStore(t), leftovers{})
}

func writeFile(t testing.TB, path, text string) { must(t, os.WriteFile(path, []byte(text), 0o600)) }

func mkdir(t testing.TB, path string) { must(t, os.MkdirAll(path, 0o700)) }

func must(t testing.TB, err error) { t.Helper(); harness.Check(t, err) }
