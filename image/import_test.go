package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
)

// dockerArchive is what docker save writes.
func dockerArchive(t *testing.T, img v1.Image, names ...string) []byte {
	t.Helper()
	all := map[name.Reference]v1.Image{}
	for _, text := range names {
		tag, err := name.NewTag(text)
		if err != nil {
			t.Fatal(err)
		}
		all[tag] = img
	}
	var buffer bytes.Buffer
	if err := tarball.MultiRefWrite(all, &buffer); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

// ociArchive is an OCI layout in a tar.
func ociArchive(t *testing.T, img v1.Image, annotations map[string]string) []byte {
	t.Helper()
	dir := t.TempDir()
	path, err := layout.Write(dir, empty.Index)
	if err != nil {
		t.Fatal(err)
	}
	if err := path.AppendImage(img, layout.WithAnnotations(annotations)); err != nil {
		t.Fatal(err)
	}
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	if err := w.AddFS(os.DirFS(dir)); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

func gzipped(t *testing.T, data []byte) []byte {
	t.Helper()
	var buffer bytes.Buffer
	w := gzip.NewWriter(&buffer)
	if _, err := w.Write(data); err != nil {
		t.Fatal(err)
	}
	if err := w.Close(); err != nil {
		t.Fatal(err)
	}
	return buffer.Bytes()
}

func TestImport(t *testing.T) {
	img := imageOf(t, v1.Config{}, layerOf(t, file("a", "1")), layerOf(t, file("b", "2")))
	docker := dockerImageOf(t, v1.Config{}, gzipLayer(t, tarOf(t, file("b", "2")), types.DockerLayer))
	for title, test := range map[string]struct {
		archive []byte
		id      string
		tags    string
	}{
		"docker save": {dockerArchive(t, docker, "app:1", "registry.example/app:2"), idOf(t, docker), "docker.io/library/app:1 registry.example/app:2"},
		"gzip":        {gzipped(t, dockerArchive(t, docker, "app:1")), idOf(t, docker), "docker.io/library/app:1"},
		"oci": {
			ociArchive(t, img, map[string]string{"org.opencontainers.image.ref.name": "docker.io/library/oci:3"}),
			idOf(t, img), "docker.io/library/oci:3",
		},
		"nameless": {ociArchive(t, img, map[string]string{"org.opencontainers.image.ref.name": "latest"}), idOf(t, img), ""},
	} {
		t.Run(title, func(t *testing.T) {
			s := openStore(t)
			if _, err := s.Import(t.Context(), bytes.NewReader(test.archive)); err != nil {
				t.Fatal(err)
			}
			collected(t, s)
			image, err := s.Get(test.id)
			if err != nil || strings.Join(image.RepoTags, " ") != test.tags {
				t.Fatalf("tags %v: %v", image.RepoTags, err)
			}
			if data, err := os.ReadFile(filepath.Join(mountImage(t, s, image), "b")); string(data) != "2" {
				t.Errorf("b holds %q: %v", data, err)
			}
			remove(t, s, image.ID)
			if all := s.List(); len(all) != 0 {
				t.Errorf("removed, and still there: %v", all)
			}
		})
	}
}

func TestImportOfABrokenArchiveLeavesNothing(t *testing.T) {
	s := openStore(t)
	whole := ociArchive(t, imageOf(t, v1.Config{}, layerOf(t, noise("a", 1<<20, 3))), nil)
	for title, archive := range map[string]io.Reader{
		"cut":        bytes.NewReader(whole[:len(whole)/2]),
		"no archive": strings.NewReader("hello"),
		"empty":      strings.NewReader(""),
		"wrong byte": bytes.NewReader(flipped(whole)),
	} {
		if _, err := s.Import(t.Context(), archive); !errdefs.IsInvalidArgument(err) {
			t.Errorf("%s: %v", title, err)
		}
	}
	if l := collected(t, s); l != (leftovers{}) {
		t.Errorf("left: %+v", l)
	}
}

// flipped changes a byte in the middle, which is in the layer.
func flipped(data []byte) []byte {
	data = bytes.Clone(data)
	data[len(data)/2] ^= 1
	return data
}
