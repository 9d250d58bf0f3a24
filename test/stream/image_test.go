package stream

import (
	"archive/tar"
	"bytes"
	"crypto/sha256"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

const (
	// imageName is the image that all containers are made from.
	imageName = "test.example/busybox:1"
	busybox   = "/bin/busybox" // Debian's busybox-static
)

// applets are the commands that the image has, beside busybox.
var applets = []string{
	"cat", "chmod", "dd", "echo", "env", "false", "grep", "head", "hostname", "httpd", "id", "kill", "ls", "mkdir", "mknod", "mount",
	"nc", "ps", "pwd", "readlink", "rm", "seq", "sh", "sleep", "stat", "stty", "tail", "touch", "true", "umount", "unshare", "wc", "wget", "yes",
}

// importImage builds the image, as docker save writes it, and brings it to the
// node.
func importImage(t testing.TB, n *harness.Node) {
	t.Helper()
	layer := layer(t)
	config := encode(t, map[string]any{
		"architecture": "amd64", "os": "linux",
		"config": map[string]any{
			"Env": []string{"PATH=/bin", "FROM=image"}, "Entrypoint": []string{"/bin/sh"}, "Cmd": []string{"-c", "exit 9"},
			"WorkingDir": "/srv", "StopSignal": "SIGUSR1",
		},
		"rootfs": map[string]any{"type": "layers", "diff_ids": []string{fmt.Sprintf("sha256:%x", sha256.Sum256(layer))}},
	})
	manifest := encode(t, []any{map[string]any{"Config": "config.json", "RepoTags": []string{imageName}, "Layers": []string{"layer.tar"}}})
	archive := newArchive(t)
	archive.file("manifest.json", 0o644, manifest)
	archive.file("config.json", 0o644, config)
	archive.file("layer.tar", 0o644, layer)
	path := filepath.Join(t.TempDir(), "image.tar")
	check(t, os.WriteFile(path, archive.bytes(), 0o600))
	n.ImportImage(path)
}

// layer is the root directory of the image.
func layer(t testing.TB) []byte {
	t.Helper()
	program, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatalf("busybox is absent, run 'make setup': %v", err)
	}
	a := newArchive(t)
	for _, dir := range []string{"bin", "dev", "etc", "proc", "srv", "sys"} {
		a.add(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755}, nil)
	}
	a.add(&tar.Header{Typeflag: tar.TypeDir, Name: "tmp", Mode: 0o1777}, nil)
	a.add(&tar.Header{Typeflag: tar.TypeDir, Name: "home", Mode: 0o755, Uid: 1000, Gid: 1000}, nil)
	a.file("bin/busybox", 0o755, program)
	for _, applet := range applets {
		a.add(&tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + applet, Linkname: "busybox"}, nil)
	}
	a.file("etc/passwd", 0o644, []byte("root:x:0:0::/root:/bin/sh\nweb:x:1000:1000::/home:/bin/sh\n"))
	a.file("etc/group", 0o644, []byte("root:x:0:\nweb:x:1000:\nextra:x:2000:web\n"))
	return a.bytes()
}

// archive is a tar file in memory.
type archive struct {
	t      testing.TB
	buffer *bytes.Buffer
	*tar.Writer
}

func newArchive(t testing.TB) *archive {
	buffer := &bytes.Buffer{}
	return &archive{t, buffer, tar.NewWriter(buffer)}
}

func (a *archive) add(header *tar.Header, content []byte) {
	a.t.Helper()
	check(a.t, a.WriteHeader(header))
	_, err := a.Write(content)
	check(a.t, err)
}

func (a *archive) file(name string, mode int64, content []byte) {
	a.t.Helper()
	a.add(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(content))}, content)
}

func (a *archive) bytes() []byte {
	a.t.Helper()
	check(a.t, a.Close())
	return a.buffer.Bytes()
}

func encode(t testing.TB, value any) []byte {
	t.Helper()
	data, err := json.Marshal(value)
	check(t, err)
	return data
}
