package image

import (
	"archive/tar"
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"golang.org/x/sys/unix"
)

// everything is an image with each kind of layer and of file.
func everything(t *testing.T) v1.Image {
	bottom := tarOf(t,
		dir("etc/"), file("etc/kept", "kept"), file("etc/gone", "gone"), dir("opaque/"), file("opaque/old", "old"),
		entry{tar.Header{Name: "setuid", Typeflag: tar.TypeReg, Mode: 0o4755, Uid: 12, Gid: 34}, []byte("x")},
		entry{tar.Header{Name: "xattr", Typeflag: tar.TypeReg, Mode: 0o644, PAXRecords: map[string]string{"SCHILY.xattr.user.colour": "blue"}}, nil},
		entry{tar.Header{Name: "null", Typeflag: tar.TypeChar, Mode: 0o666, Devmajor: 1, Devminor: 3}, nil},
		entry{tar.Header{Name: "fifo", Typeflag: tar.TypeFifo, Mode: 0o600}, nil},
	)
	middle := tarOf(t,
		file("etc/.wh.gone", ""), dir("opaque/"), file("opaque/.wh..wh..opq", ""), file("opaque/new", "new"),
		file("first", "linked"), hardlink("second", "first"),
	)
	top := tarOf(t, file("etc/kept", "changed"),
		entry{tar.Header{Name: "soft", Typeflag: tar.TypeSymlink, Linkname: "/etc/kept"}, nil},
		file("odd \n näme/…", "odd"), file(strings.Repeat("d/", 120)+"deep", "deep"))
	config := v1.Config{
		User: "web:www", Env: []string{"A=b"}, Entrypoint: []string{"/bin/e"}, Cmd: []string{"c"}, WorkingDir: "/w",
		StopSignal: "SIGQUIT", Volumes: map[string]struct{}{"/v": {}}, Labels: map[string]string{"l": "m"},
	}
	return imageOf(t, config, gzipLayer(t, bottom, types.OCILayer), zstdLayer(t, middle), plainLayer(top))
}

func TestPullUnpacksEveryKindOfLayerAndFile(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img := everything(t)
	image := pull(t, s, registry.push(t, "every/thing:1", img))
	if image.ID != idOf(t, img) {
		t.Errorf("id %s, want %s", image.ID, idOf(t, img))
	}
	root := mountImage(t, s, image)
	checkEverything(t, root)
	value := make([]byte, 16)
	n, err := unix.Getxattr(filepath.Join(root, "xattr"), "user.colour", value)
	if err != nil || string(value[:n]) != "blue" {
		t.Errorf("xattr: %q, %v", value[:max(n, 0)], err)
	}
	checkConfig(t, image)
}

// checkEverything looks for the files of the image everything.
func checkEverything(t *testing.T, root string) {
	t.Helper()
	for name, want := range map[string]string{
		"etc/kept": "changed", "opaque/new": "new", "first": "linked", "second": "linked",
		"odd \n näme/…": "odd", strings.Repeat("d/", 120) + "deep": "deep", "setuid": "x",
	} {
		checkFile(t, filepath.Join(root, name), want)
	}
	for _, name := range []string{"etc/gone", "opaque/old"} {
		if _, err := os.Lstat(filepath.Join(root, name)); !errors.Is(err, fs.ErrNotExist) {
			t.Errorf("%s is there, though a whiteout removed it: %v", name, err)
		}
	}
	stat := func(name string) *syscall.Stat_t {
		info, err := os.Lstat(filepath.Join(root, name))
		must(t, err)
		return info.Sys().(*syscall.Stat_t)
	}
	if st := stat("setuid"); st.Mode != syscall.S_IFREG|0o4755 || st.Uid != 12 || st.Gid != 34 {
		t.Errorf("setuid: mode %o, owner %d:%d", st.Mode, st.Uid, st.Gid)
	}
	if st := stat("null"); st.Mode&syscall.S_IFMT != syscall.S_IFCHR || st.Rdev != unix.Mkdev(1, 3) {
		t.Errorf("null: mode %o, device %x", st.Mode, st.Rdev)
	}
	if st := stat("fifo"); st.Mode&syscall.S_IFMT != syscall.S_IFIFO {
		t.Errorf("fifo: mode %o", st.Mode)
	}
	if a, b := stat("first"), stat("second"); a.Ino != b.Ino {
		t.Errorf("first and second are not one file: %d, %d", a.Ino, b.Ino)
	}
}

func checkConfig(t *testing.T, image Image) {
	t.Helper()
	c := image.Spec.Config
	if c.StopSignal != "SIGQUIT" || c.WorkingDir != "/w" || !slices.Equal(c.Env, []string{"A=b"}) || c.Labels["l"] != "m" ||
		!slices.Equal(c.Entrypoint, []string{"/bin/e"}) || !slices.Equal(c.Cmd, []string{"c"}) || len(c.Volumes) != 1 {
		t.Errorf("configuration: %+v", c)
	}
	if uid, name := image.User(); uid != nil || name != "web" {
		t.Errorf("user %v %q, want web", uid, name)
	}
	if image.Size <= 0 {
		t.Errorf("size %d", image.Size)
	}
}

func TestPullOfDockerSchema2(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img := dockerImageOf(t, v1.Config{User: "1000"}, gzipLayer(t, tarOf(t, file("a", "1")), types.DockerLayer))
	image := pull(t, s, registry.push(t, "docker:2", img))
	if uid, name := image.User(); uid == nil || *uid != 1000 || name != "" {
		t.Errorf("user %v %q, want 1000", uid, name)
	}
	checkFile(t, filepath.Join(mountImage(t, s, image), "a"), "1")
}

func TestImageIsTheSameUnderEachOfItsNames(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img := smallImage(t)
	one, two := registry.push(t, "lib/name:one", img), registry.push(t, "lib/name:two", img)
	pinned := registry.host() + "/lib/name@" + digestOf(t, img)
	if image := pull(t, s, pinned); len(image.RepoTags) != 0 || !slices.Equal(image.RepoDigests, []string{pinned}) {
		t.Errorf("names %v %v", image.RepoTags, image.RepoDigests)
	}
	pull(t, s, one)
	image := pull(t, s, two)
	if both := pull(t, s, two+"@"+digestOf(t, img)); both.ID != image.ID {
		t.Errorf("tag and digest: %s, want %s", both.ID, image.ID)
	}
	if !slices.Equal(image.RepoTags, []string{one, two}) || !slices.Equal(image.RepoDigests, []string{pinned}) {
		t.Errorf("names %v %v", image.RepoTags, image.RepoDigests)
	}
	for _, name := range []string{one, two, pinned, image.ID, strings.TrimPrefix(image.ID, "sha256:"), image.ID[7:20]} {
		if got, err := s.Get(name); err != nil || got.ID != image.ID {
			t.Errorf("get %s: %s, %v", name, got.ID, err)
		}
	}
	untag(t, s, one)
	if _, err := s.Get(one); !errdefs.IsNotFound(err) {
		t.Errorf("removed tag: %v", err)
	}
	if left, err := s.Get(pinned); err != nil || !slices.Equal(left.RepoTags, []string{two}) {
		t.Errorf("after removing one tag: %v, %v", left.RepoTags, err)
	}
	untag(t, s, two)
	if all := s.List(); len(all) != 0 {
		t.Errorf("the digest outlived the last tag: %+v", all)
	}
	untag(t, s, two)                                           // again: no error
	for _, unknown := range []string{image.ID, image.ID[7:]} { // no bad name
		remove(t, s, unknown)
		if _, err := s.Get(unknown); !errdefs.IsNotFound(err) {
			t.Errorf("%s: %v", unknown, err)
		}
	}
}

func untag(t *testing.T, s *Store, name string) {
	t.Helper()
	must(t, s.Untag(t.Context(), name))
}

// The CRI: RemoveImage removes all tags, whichever name it is given.
func TestRemoveByIDRemovesAllNames(t *testing.T) {
	registry := newTestRegistry(t)
	img := smallImage(t)
	one, two := registry.push(t, "one:1", img), registry.push(t, "two:2", img)
	for name, of := range map[string]func(Image) string{
		"tag":    func(Image) string { return one },
		"digest": func(i Image) string { return i.RepoDigests[1] },
		"id":     func(i Image) string { return i.ID },
		"prefix": func(i Image) string { return i.ID[7:20] },
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t, func(c *Config) { c.Pinned = []string{one} }) // which keeps it from nobody who asks
			pull(t, s, one)
			image := pull(t, s, two)
			if !image.Pinned {
				t.Errorf("%+v is not pinned", image)
			}
			if l := collected(t, s); l.snapshots != 1 || l.blobs != 2 {
				t.Errorf("an image of one layer leaves %+v, want a manifest, a configuration and a snapshot", l)
			}
			remove(t, s, of(image))
			checkLeft(t, s, leftovers{})
			remove(t, s, of(image)) // again: no error
		})
	}
}

func remove(t *testing.T, s *Store, refOrID string) {
	t.Helper()
	must(t, s.Remove(t.Context(), refOrID))
}

// TestMovedTag: a tag that points elsewhere leaves the old image under its
// digest, for the containers that run from it and the kubelet to remove.
func TestMovedTag(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	reference := registry.push(t, "moved:1", imageOf(t, v1.Config{}, layerOf(t, file("a", "old"))))
	before := pull(t, s, reference)
	registry.push(t, "moved:1", imageOf(t, v1.Config{}, layerOf(t, file("a", "new"))))
	after := pull(t, s, reference)
	old, err := s.Get(before.ID)
	if err != nil || len(old.RepoTags) != 0 || len(old.RepoDigests) != 1 {
		t.Errorf("the old image: %+v, %v", old, err)
	}
	if got, err := s.Get(reference); err != nil || got.ID != after.ID || after.ID == before.ID {
		t.Errorf("the tag: %s, %v", got.ID, err)
	}
}

// TestHostileLayersStayInside: names and links that point out of the layer.
func TestHostileLayersStayInside(t *testing.T) {
	s, registry, outside := openStore(t), newTestRegistry(t), t.TempDir()
	symlink := func(name, target string) entry {
		return entry{tar.Header{Name: name, Typeflag: tar.TypeSymlink, Linkname: target}, nil}
	}
	image := pull(t, s, registry.push(t, "hostile:1", imageOf(t, v1.Config{},
		layerOf(t, symlink("out", outside), symlink("up", "../../../../../../../.."+outside)),
		layerOf(t, file("out/a", "x"), file("up/b", "x"), file("../../../../../../../.."+outside+"/c", "x"), file(outside+"/d", "x")))))
	root := mountImage(t, s, image)
	if n := entries(t, outside); n != 0 {
		t.Errorf("%d files were written outside", n)
	}
	checkFile(t, filepath.Join(root, outside, "d"), "x")
}
