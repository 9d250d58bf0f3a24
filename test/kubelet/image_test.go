package kubelet

import (
	"archive/tar"
	"bytes"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/minicri/minicri/test/harness"
)

const (
	// imageName is the image that all containers are made from.
	imageName = "test.example/busybox:1"
	busybox   = "/bin/busybox" // Debian's busybox-static
)

// applets are the commands that the image has, beside busybox.
const applets = "cat echo false grep head httpd id ls mkdir nc ps rm sh sleep stat tail test touch true wc wget"

// importImage builds the image and brings it to the node.
func importImage(t testing.TB, n *harness.Node) {
	t.Helper()
	content := layer(t)
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(content)), nil })
	check(t, err)
	image, err := mutate.AppendLayers(empty.Image, layer)
	check(t, err)
	image, err = mutate.Config(image, v1.Config{Env: []string{"PATH=/bin"}})
	check(t, err)
	tag, err := name.NewTag(imageName)
	check(t, err)
	path := filepath.Join(t.TempDir(), "image.tar")
	check(t, tarball.WriteToFile(path, tag, image))
	n.ImportImage(path)
}

// layer is the root directory of the image, as a tar file.
func layer(t testing.TB) []byte {
	t.Helper()
	program, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatalf("busybox is absent, run 'make setup': %v", err)
	}
	var buffer bytes.Buffer
	archive := tar.NewWriter(&buffer)
	add := func(header tar.Header, content []byte) {
		header.Size = int64(len(content))
		check(t, archive.WriteHeader(&header))
		_, err := archive.Write(content)
		check(t, err)
	}
	for _, dir := range []string{"bin", "etc", "proc", "sys", "tmp"} {
		add(tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755}, nil)
	}
	add(tar.Header{Typeflag: tar.TypeReg, Name: "bin/busybox", Mode: 0o755}, program)
	for applet := range strings.FieldsSeq(applets) {
		add(tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + applet, Linkname: "busybox"}, nil)
	}
	check(t, archive.Close())
	return buffer.Bytes()
}
