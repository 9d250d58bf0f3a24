package image

import (
	"archive/tar"
	"os"
	"path/filepath"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/opencontainers/go-digest"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

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

// attack: images: layers that do not list the directories their files are in
// held: such a directory keeps owner, mode and xattrs of the layers below; one that was removed below is new; below a file or a link in circles the pull fails
// field: containerd with max_concurrent_unpacks > 1 makes them 0755 root:root
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
