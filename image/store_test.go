package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"log/slog"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/runtime-spec/specs-go"
	"go.uber.org/goleak"
	"golang.org/x/sys/unix"

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
	must(t, s.content.Walk(ctx, func(content.Info) error { known.blobs++; return nil }))
	must(t, s.snapshots.Walk(ctx, func(context.Context, snapshots.Info) error { known.snapshots++; return nil }))
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

func TestContainerKeepsItsFilesWhenItsImageGoes(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "used:1", imageOf(t, v1.Config{}, layerOf(t, file("a", "1")), layerOf(t, file("b", "2")))))
	root := mountImage(t, s, image)
	remove(t, s, image.ID)
	checkLeft(t, s, leftovers{snapshots: 3}) // two layers and the container's
	checkFile(t, filepath.Join(root, "b"), "2")
	pull(t, s, registry.host()+"/used:1") // again, while the container has it
}

func TestSnapshotOfAContainer(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "snap:1", smallImage(t)))
	must(t, s.Prepare(t.Context(), "c1", image.ID, PrepareOptions{}))
	err := s.Prepare(t.Context(), "c1", image.ID, PrepareOptions{})
	harness.Want(t, errdefs.IsAlreadyExists(err), "prepared twice: %v", err)
	err = s.Prepare(t.Context(), "c2", "sha256:0123456789", PrepareOptions{})
	harness.Want(t, errdefs.IsNotFound(err), "prepared without an image: %v", err)
	s = reopened(t, s)
	keys, err := s.Snapshots(t.Context())
	harness.Want(t, err == nil && slices.Equal(keys, []string{"c1"}), "snapshots after a restart: %v, %v", keys, err)
	target := filepath.Join(t.TempDir(), "rootfs")
	must(t, s.Mount(t.Context(), "c1", target, ""))
	checkUsage(t, s, target)
	snapshot, err := s.snapshots.Stat(s.scope(t.Context()), "c1")
	must(t, err)
	held, err := os.Open(filepath.Join(snapshot.Labels[upperdirLabel], "big")) // as an overlay does until it has ended
	must(t, err)
	defer held.Close()
	for range 2 { // both are idempotent
		must(t, s.Unmount(target))
		must(t, s.RemoveSnapshot(t.Context(), "c1"))
	}
	harness.Same(t, "files of the layer after it was removed", entries(t, snapshot.Labels[upperdirLabel]), 0)
	info, err := held.Stat()
	harness.Want(t, err == nil && info.Size() == 0, "a removed file keeps its %d bytes on the disk: %v", info.Size(), err)
	checkLeft(t, s, leftovers{blobs: 2, snapshots: 1, records: 1})
}

// checkUsage writes 1 MiB and ten files and demands to find them.
func checkUsage(t *testing.T, s *Store, target string) {
	must(t, os.WriteFile(filepath.Join(target, "big"), make([]byte, 1<<20), 0o644))
	for i := range 10 {
		must(t, os.WriteFile(filepath.Join(target, fmt.Sprint(i)), nil, 0o644))
	}
	own, err := s.SnapshotUsage(t.Context(), "c1")
	harness.Need(t, err == nil, "container: %+v, %v", own, err)
	harness.Want(t, own.Bytes >= 1<<20, "container: %+v, %v", own, err)
	harness.Want(t, own.Bytes <= 2<<20, "container: %+v, %v", own, err)
	harness.Want(t, own.Inodes >= 11, "container: %+v, %v", own, err)
	harness.Want(t, own.Inodes <= 14, "container: %+v, %v", own, err)
	harness.Want(t, !own.Time.IsZero(), "container: %+v, %v", own, err)
	images, err := s.ImageUsage(t.Context())
	harness.Need(t, err == nil, "images: %+v, %v", images, err)
	harness.Want(t, images.Bytes != 0, "images: %+v, %v", images, err)
	harness.Want(t, images.Bytes < 1<<20, "images: %+v, %v", images, err)
	harness.Want(t, images.Inodes != 0, "images: %+v, %v", images, err)
	s.snapshots = unmeasured{s.snapshots}
	_, err = s.ImageUsage(t.Context())
	harness.Same(t, "error for layers that were removed since they were listed", err, nil)
}

// unmeasured are snapshots that are gone when they are measured.
type unmeasured struct{ snapshots.Snapshotter }

func (unmeasured) Usage(context.Context, string) (snapshots.Usage, error) {
	return snapshots.Usage{}, errdefs.ErrNotFound
}

func TestSnapshotForAUserNamespace(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "userns:1", smallImage(t)))
	shift := []specs.LinuxIDMapping{{HostID: 100000, Size: 65536}}
	for _, readOnly := range []bool{false, true} {
		target := mountAs(t, s, fmt.Sprint("shifted", readOnly), image, PrepareOptions{ReadOnly: readOnly, UIDs: shift, GIDs: shift})
		defer s.Unmount(target)
		info, err := os.Stat(filepath.Join(target, "a"))
		must(t, err)
		st := info.Sys().(*syscall.Stat_t)
		harness.Want(t, st.Uid == 100000 && st.Gid == 100000, "read-only %t: a belongs to %d:%d, want 100000", readOnly, st.Uid, st.Gid)
	}
}

func TestImageWithoutLayers(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "empty:1", imageOf(t, v1.Config{Cmd: []string{"/x"}})))
	harness.Same(t, "files in an empty image", entries(t, mountImage(t, s, image)), 0)
}

// What was unmounted is mounted nowhere at once, and not in use once the store
// is closed: the disk below can be unmounted.
func TestCloseEndsWhatWasUnmounted(t *testing.T) {
	disk, registry := t.TempDir(), newTestRegistry(t)
	must(t, unix.Mount("tmpfs", disk, "tmpfs", 0, ""))
	t.Cleanup(func() { _ = unix.Unmount(disk, unix.MNT_DETACH) })
	s := openStoreAt(t, disk)
	image := pull(t, s, registry.push(t, "gone:1", smallImage(t)))
	for _, key := range []string{"c1", "c2", "c3", "c4"} {
		target := mountAs(t, s, key, image, PrepareOptions{})
		must(t, os.WriteFile(filepath.Join(target, "written"), make([]byte, 1<<20), 0o644))
		must(t, s.Unmount(target))
		harness.Want(t, !strings.Contains(string(harness.Read(t, "/proc/self/mountinfo")), target), "%s is still mounted", target)
		must(t, s.RemoveSnapshot(t.Context(), key))
	}
	var behind [2]int
	must(t, unix.Pipe2(behind[:], unix.O_CLOEXEC|unix.O_NONBLOCK))
	t.Cleanup(func() { _ = unix.Close(behind[0]) })
	closing := make(chan struct{})
	s.unmounted.Go(func() error { <-closing; return unix.Close(behind[1]) })
	go close(closing)
	must(t, s.Close())
	n, err := unix.Read(behind[0], make([]byte, 1))
	harness.Want(t, n == 0 && err == nil, "the store is closed, and what was to be ended before is not: %d, %v", n, err)
	unmountDisk(t, disk)
}

// TestMain runs the tests, or, as a child of them, one pull or one decoder.
func TestMain(m *testing.M) {
	if IsZstdDecoder() {
		os.Exit(DecodeZstd())
	}
	if err := log.SetLevel("fatal"); err != nil {
		fmt.Fprintln(os.Stderr, err)
		os.Exit(1)
	}
	if os.Getenv(childRoot) != "" {
		os.Exit(pullAsChild())
	}
	goleak.VerifyTestMain(m)
}

func TestParseReference(t *testing.T) {
	hash := "sha256:" + digest.FromString("x").Encoded()
	for text, want := range map[string]string{
		"busybox":                          "docker.io/library/busybox:latest",
		"busybox:1":                        "docker.io/library/busybox:1",
		"team/app":                         "docker.io/team/app:latest",
		"index.docker.io/library/busybox":  "docker.io/library/busybox:latest",
		"localhost/app":                    "localhost/app:latest",
		"registry.example:5000/a/b:c":      "registry.example:5000/a/b:c",
		"app@" + hash:                      "docker.io/library/app@" + hash,
		"registry.example/app:tag@" + hash: "registry.example/app@" + hash,
	} {
		ref, err := ParseReference(text)
		harness.Want(t, err == nil && ref.String() == want, "%s is %s, want %s: %v", text, ref, want, err)
	}
	for _, text := range []string{"", "library/UPPER", "a b", "app@sha256:short", "../x", "https://registry.example/app", "app:"} {
		ref, err := ParseReference(text)
		harness.Want(t, errdefs.IsInvalidArgument(err), "%q is %s: %v", text, ref, err)
	}
}

// FuzzParseReference: what was parsed is stable, and an id is never mistaken.
func FuzzParseReference(f *testing.F) {
	for _, seed := range []string{"busybox", "a/b:c@sha256:00", "deadbeef", "[::1]:5000/x"} {
		f.Add(seed)
	}
	f.Fuzz(func(t *testing.T, text string) {
		ref, err := ParseReference(text)
		if err != nil {
			return
		}
		again, err := ParseReference(ref.String())
		harness.Want(t, err == nil && again == ref, "%q is %q, which is %q: %v", text, ref, again, err)
	})
}

// owned is a directory with an owner and a mode of its own.
func owned(name string, mode int64, uid int) entry {
	return entry{tar.Header{
		Name: name, Typeflag: tar.TypeDir, Mode: mode, Uid: uid, Gid: uid, ModTime: time.Unix(1e9, 0),
		PAXRecords: map[string]string{"SCHILY.xattr.user.of": name},
	}, nil}
}

// withoutParents is an image whose upper layers list files but not the
// directories that these are in, as crane append, Bazel and nix make them. more is another layer.
func withoutParents(t *testing.T, more ...entry) v1.Image {
	return imageOf(t, v1.Config{},
		layerOf(t, owned("tmp/", 0o1777, 0), owned("home/", 0o755, 0), owned("home/bob/", 0o700, 1000), owned("gone/", 0o700, 7),
			owned("opaque/", 0o750, 0), owned("opaque/below/", 0o700, 8), owned("changed/", 0o700, 9), owned("linked/", 0o711, 6),
			owned("gone/deep/", 0o700, 7), owned("file/", 0o700, 7), symlink("link", "linked"), symlink("circle", "circle")),
		layerOf(t, file("home/bob/a/b/file", "1"), file(".wh.gone", ""), file("file", "no directory"), file("opaque/.wh..wh..opq", ""), owned("changed/", 0o2770, 10)),
		layerOf(t, file("tmp/file", "2"), file("home/bob/a/second", "2"), file("gone/file", "new"), file("gone/deep/file", "new"),
			file("link/file", "2"), file("opaque/below/file", "new"), file("changed/file", "2")),
		layerOf(t, file("tmp/other", "3"), owned("home/bob/a/", 0o711, 5), file("home/bob/a/b/c/third", "3")),
		layerOf(t, append(more, file("last", "4"))...),
	)
}

func symlink(name, target string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target}, nil}
}

type ownerMode struct {
	mode     uint32
	uid, gid uint32
	xattr    string
}

func attributesOf(t *testing.T, path string) ownerMode {
	info, err := os.Lstat(path)
	must(t, err)
	stat := info.Sys().(*syscall.Stat_t)
	value := make([]byte, 64)
	n, err := unix.Lgetxattr(path, "user.of", value)
	if err != nil {
		n = 0
	}
	return ownerMode{stat.Mode &^ syscall.S_IFMT, stat.Uid, stat.Gid, string(value[:n])}
}

// attack: images: layers do not list the directories of their files
// held: such a directory keeps owner, mode and xattrs of the layers below; a directory that was removed below is new; below a file or a circular link the pull fails
// field: containerd creates them as 0755 root:root if max_concurrent_unpacks is above 1
func TestUnlistedDirectoriesKeepTheirAttributes(t *testing.T) {
	registry, s := newTestRegistry(t), openStore(t)
	root := mountImage(t, s, pull(t, s, registry.push(t, "parents:1", withoutParents(t))))
	for name, want := range map[string]ownerMode{
		"tmp": {0o1777, 0, 0, "tmp/"}, "home": {0o755, 0, 0, "home/"}, "home/bob": {0o700, 1000, 1000, "home/bob/"},
		"home/bob/a": {0o711, 5, 5, "home/bob/a/"}, "home/bob/a/b": {0o755, 0, 0, ""}, "gone": {0o755, 0, 0, ""}, "gone/deep": {0o755, 0, 0, ""},
		"linked": {0o711, 6, 6, "linked/"}, "opaque": {0o750, 0, 0, "opaque/"}, "opaque/below": {0o755, 0, 0, ""}, "changed": {0o2770, 10, 10, "changed/"},
	} {
		harness.Same(t, name, attributesOf(t, filepath.Join(root, name)), want)
	}
	for _, name := range []string{"file/deep/file", "circle/deep/file"} {
		_, err := s.Pull(t.Context(), registry.push(t, "below:1", withoutParents(t, file(name, "1"))), Auth{}, nil)
		harness.Want(t, err != nil, "a layer with %s is unpacked", name)
	}
}
