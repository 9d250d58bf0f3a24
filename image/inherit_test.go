package image

import (
	"archive/tar"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
)

// owned is a directory with an owner and a mode of its own.
func owned(name string, mode int64, uid int) entry {
	return entry{tar.Header{
		Name: name, Typeflag: tar.TypeDir, Mode: mode, Uid: uid, Gid: uid, ModTime: time.Unix(1e9, 0),
		PAXRecords: map[string]string{"SCHILY.xattr.user.of": name},
	}, nil}
}

// withoutParents is an image whose upper layers list files but not the
// directories that these are in, as crane append, Bazel and nix make them.
func withoutParents(t *testing.T) v1.Image {
	return imageOf(t, v1.Config{},
		layerOf(t, owned("tmp/", 0o1777, 0), owned("home/", 0o755, 0), owned("home/bob/", 0o700, 1000), owned("gone/", 0o700, 7),
			owned("opaque/", 0o750, 0), owned("opaque/below/", 0o700, 8), owned("changed/", 0o700, 9), owned("linked/", 0o711, 6),
			owned("gone/deep/", 0o700, 7), owned("file/", 0o700, 7), owned("file/deep/", 0o700, 7), symlink("link", "linked"), symlink("circle", "circle")),
		layerOf(t, file("home/bob/a/b/file", "1"), file(".wh.gone", ""), file("file", "no directory"), file("opaque/.wh..wh..opq", ""), owned("changed/", 0o2770, 10)),
		layerOf(t, file("tmp/file", "2"), file("home/bob/a/second", "2"), file("gone/file", "new"), file("gone/deep/file", "new"),
			file("file/deep/file", "new"), file("link/file", "2"), file("circle/deep/file", "2"), file("opaque/below/file", "new"), file("changed/file", "2")),
		layerOf(t, file("tmp/other", "3"), owned("home/bob/a/", 0o711, 5), file("home/bob/a/b/c/third", "3")),
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
	t.Helper()
	info, err := os.Lstat(path)
	if err != nil {
		t.Fatal(err)
	}
	stat := info.Sys().(*syscall.Stat_t)
	value := make([]byte, 64)
	n, err := unix.Lgetxattr(path, "user.of", value)
	if err != nil {
		n = 0
	}
	return ownerMode{stat.Mode &^ syscall.S_IFMT, stat.Uid, stat.Gid, string(value[:n])}
}

// attack: images: layers that do not list the directories their files are in, unpacked by one to eight at once
// held: such a directory keeps owner, mode, times and xattrs of the layers below; one that was removed or hidden below, by a file or a link in circles, too, is new
// field: containerd with max_concurrent_unpacks > 1 makes them 0755 root:root
func TestUnlistedDirectoriesKeepTheirAttributes(t *testing.T) {
	registry := newTestRegistry(t)
	reference := registry.push(t, "parents:1", withoutParents(t))
	for _, unpacks := range []int{1, 2, 8} {
		t.Run(fmt.Sprint(unpacks), func(t *testing.T) {
			s := openStore(t, func(c *Config) { c.MaxUnpacks = unpacks })
			root := mountImage(t, s, pull(t, s, reference))
			for name, want := range map[string]ownerMode{
				"tmp": {0o1777, 0, 0, "tmp/"}, "home": {0o755, 0, 0, "home/"}, "home/bob": {0o700, 1000, 1000, "home/bob/"},
				"home/bob/a": {0o711, 5, 5, "home/bob/a/"}, "home/bob/a/b": {0o755, 0, 0, ""}, "gone": {0o755, 0, 0, ""}, "gone/deep": {0o755, 0, 0, ""}, "file": {0o755, 0, 0, ""}, "file/deep": {0o755, 0, 0, ""},
				"link": {0o711, 6, 6, "linked/"}, "circle": {0o755, 0, 0, ""}, "circle/deep": {0o755, 0, 0, ""},
				"opaque": {0o750, 0, 0, "opaque/"}, "opaque/below": {0o755, 0, 0, ""}, "changed": {0o2770, 10, 10, "changed/"},
			} {
				if got := attributesOf(t, filepath.Join(root, name)); got != want {
					t.Errorf("%s: %+v, want %+v", name, got, want)
				}
			}
			if info, err := os.Stat(filepath.Join(root, "tmp")); err != nil || info.ModTime().Unix() != 1e9 {
				t.Errorf("tmp was changed at %v: %v", info.ModTime(), err)
			}
		})
	}
}

// A directory whose place a later entry of the same layer takes is no parent any
// more, and one that is listed after its files keeps what the listing says.
func TestOrderWithinALayer(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "order:1", imageOf(t, v1.Config{},
		layerOf(t, owned("late/", 0o700, 3), owned("replaced/", 0o700, 4), owned("replaced/by/", 0o700, 4)),
		layerOf(t, file("late/file", "1"), owned("late/", 0o770, 1), file("replaced/by/file", "1"), file("replaced", "a file")))))
	root := mountImage(t, s, image)
	if got := attributesOf(t, filepath.Join(root, "late")); got != (ownerMode{0o770, 1, 1, "late/"}) {
		t.Errorf("late: %+v", got)
	}
	if info, err := os.Lstat(filepath.Join(root, "replaced")); err != nil || !info.Mode().IsRegular() {
		t.Errorf("replaced: %v %v", info, err)
	}
}
