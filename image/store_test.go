package image

import (
	"context"
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

// openStore opens a store in a directory of the test, with a collection that
// runs only when the test asks.
func openStore(t testing.TB, change ...func(*Config)) *Store {
	t.Helper()
	return openStoreAt(t, t.TempDir(), change...)
}

func openStoreAt(t testing.TB, root string, change ...func(*Config)) *Store {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("the tests of image mount overlays: run them as root")
	}
	config := Config{Root: root, CollectDelay: time.Hour, Logger: slog.New(slog.NewTextHandler(io.Discard, nil))}
	for _, f := range change {
		f(&config)
	}
	s, err := Open(t.Context(), config)
	must(t, err)
	t.Cleanup(func() {
		report(t, s.Close())
	})
	return s
}

// reopened is the store as the next daemon opens it.
func reopened(t testing.TB, s *Store, change ...func(*Config)) *Store {
	t.Helper()
	must(t, s.Close())
	return openStoreAt(t, filepath.Dir(s.dir), change...)
}

func pull(t testing.TB, s *Store, reference string) Image {
	t.Helper()
	image, err := s.Pull(t.Context(), reference, Auth{}, nil)
	must(t, err)
	return image
}

// mountImage prepares and mounts a snapshot of an image and returns the path.
func mountImage(t testing.TB, s *Store, image Image) string {
	t.Helper()
	key := filepath.Base(t.TempDir()) + image.ID
	target := mountAs(t, s, key, image, PrepareOptions{})
	t.Cleanup(func() {
		report(t, s.Unmount(target))
		report(t, s.RemoveSnapshot(context.Background(), key))
	})
	return target
}

// mountAs is mountImage under a name of the test's, which is left to it.
func mountAs(t testing.TB, s *Store, key string, image Image, options PrepareOptions) (target string) {
	t.Helper()
	must(t, s.Prepare(t.Context(), key, image.ID, options))
	target = filepath.Join(t.TempDir(), "rootfs")
	must(t, s.Mount(t.Context(), key, target, ""))
	return target
}

func checkFile(t testing.TB, path, want string) {
	t.Helper()
	if data, err := os.ReadFile(path); err != nil || string(data) != want {
		t.Errorf("%q holds %q, want %q: %v", path, data, want, err)
	}
}

// checkLeft runs a collection and compares what is left.
func checkLeft(t testing.TB, s *Store, want leftovers) {
	t.Helper()
	if l := collected(t, s); l != want {
		t.Errorf("left: %+v, want %+v", l, want)
	}
}

// leftovers is what is on the disk of a store: blobs, ingests and snapshot
// directories.
type leftovers struct{ blobs, ingests, snapshots, records int }

// collected runs a collection and counts what is left.
func collected(t testing.TB, s *Store) leftovers {
	t.Helper()
	must(t, s.Collect(t.Context()))
	l := leftovers{
		blobs:     files(t, filepath.Join(s.dir, "content", "blobs")),
		ingests:   entries(t, filepath.Join(s.dir, "content", "ingest")),
		snapshots: entries(t, filepath.Join(s.dir, "overlayfs", "snapshots")),
		records:   len(s.List()),
	}
	checkDatabase(t, s, l)
	return l
}

// checkDatabase demands that the database knows exactly what is on the disk.
func checkDatabase(t testing.TB, s *Store, l leftovers) {
	t.Helper()
	ctx, known := s.scope(t.Context()), leftovers{}
	err := s.content.Walk(ctx, func(content.Info) error { known.blobs++; return nil })
	must(t, err)
	err = s.snapshots.Walk(ctx, func(context.Context, snapshots.Info) error { known.snapshots++; return nil })
	must(t, err)
	if known.blobs != l.blobs || known.snapshots != l.snapshots {
		t.Errorf("database knows %+v, on disk are %+v", known, l)
	}
}

func files(t testing.TB, root string) (n int) {
	t.Helper()
	err := filepath.WalkDir(root, func(_ string, d fs.DirEntry, err error) error {
		if err == nil && !d.IsDir() {
			n++
		}
		return err
	})
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return n
}

func entries(t testing.TB, dir string) int {
	t.Helper()
	all, err := os.ReadDir(dir)
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	return len(all)
}

func TestCollectionOfANewStore(t *testing.T) {
	checkLeft(t, openStore(t), leftovers{})
}

func writeFile(t testing.TB, path, text string) {
	t.Helper()
	must(t, os.WriteFile(path, []byte(text), 0o600))
}

func mkdir(t testing.TB, path string) {
	t.Helper()
	must(t, os.MkdirAll(path, 0o700))
}

func must(t testing.TB, err error) { t.Helper(); harness.Check(t, err) }

// report fails the test for an error, and goes on.
func report(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Error(err)
	}
}
