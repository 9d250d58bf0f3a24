package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	bolt "go.etcd.io/bbolt"

	"github.com/minicri/minicri/test/harness"
)

// dockerArchive is what docker save writes.
func dockerArchive(t *testing.T, img v1.Image, names ...string) []byte {
	all := map[name.Reference]v1.Image{}
	for _, text := range names {
		tag, err := name.NewTag(text)
		must(t, err)
		all[tag] = img
	}
	var buffer bytes.Buffer
	must(t, tarball.MultiRefWrite(all, &buffer))
	return buffer.Bytes()
}

// ociArchive is an OCI layout in a tar.
func ociArchive(t *testing.T, img v1.Image, annotations map[string]string) []byte {
	dir := t.TempDir()
	path, err := layout.Write(dir, empty.Index)
	must(t, err)
	must(t, path.AppendImage(img, layout.WithAnnotations(annotations)))
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	must(t, w.AddFS(os.DirFS(dir)))
	must(t, w.Close())
	return buffer.Bytes()
}

func gzipped(t *testing.T, data []byte) []byte {
	var buffer bytes.Buffer
	w := gzip.NewWriter(&buffer)
	_, err := w.Write(data)
	must(t, errors.Join(err, w.Close()))
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
			_, err := s.Import(t.Context(), bytes.NewReader(test.archive))
			must(t, err)
			collected(t, s)
			image, err := s.Get(test.id)
			harness.Want(t, err == nil && strings.Join(image.RepoTags, " ") == test.tags, "tags %v: %v", image.RepoTags, err)
			checkFile(t, filepath.Join(mountImage(t, s, image), "b"), "2")
			remove(t, s, image.ID)
			harness.Same(t, "removed, and still there", s.List(), nil)
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
		_, err := s.Import(t.Context(), archive)
		harness.Want(t, errdefs.IsInvalidArgument(err), "%s: %v", title, err)
	}
	checkLeft(t, s, leftovers{})
}

// flipped changes a byte in the middle, which is in the layer.
func flipped(data []byte) []byte {
	data = bytes.Clone(data)
	data[len(data)/2] ^= 1
	return data
}

// taggedArchive is what docker save writes of one image with many tags.
func taggedArchive(t *testing.T, tags []string) []byte {
	layer := tarOf(t, file("a", "1"))
	config, err := json.Marshal(ocispec.Image{
		Platform: ocispec.Platform{OS: "linux", Architecture: nodePlatformArch()},
		RootFS:   ocispec.RootFS{Type: "layers", DiffIDs: []digest.Digest{digest.FromBytes(layer)}},
	})
	must(t, err)
	manifest, err := json.Marshal([]map[string]any{{"Config": "config.json", "Layers": []string{"layer.tar"}, "RepoTags": tags}})
	must(t, err)
	return tarOf(t, file("layer.tar", string(layer)), file("config.json", string(config)), file("manifest.json", string(manifest)))
}

// attack: images: an archive of one image with 20000 tags; the same with a tag that cannot be recorded
// held: imported in one transaction: all tags or none, in seconds
func TestImportOfManyTagsIsOneTransaction(t *testing.T) {
	const count = 20000
	s := openStoreAt(t, inMemory(t))
	tags := make([]string, count)
	for i := range tags {
		tags[i] = fmt.Sprintf("registry.example/app:%d", i)
	}
	before := transactions(s)
	began := time.Now()
	imported, err := s.Import(t.Context(), bytes.NewReader(taggedArchive(t, tags)))
	harness.Need(t, err == nil && len(imported) == 1 && len(imported[0].RepoTags) == count, "%d images: %v", len(imported), err)
	t.Logf("%d tags in %v and %d transactions", count, time.Since(began), transactions(s)-before)
	n := transactions(s) - before
	harness.Want(t, n <= 100, "%d transactions", n)
	remove(t, s, imported[0].ID)
	harness.Want(t, len(s.List()) == 0, "the image is still there")

	// The database refuses a name of nothing.
	_, err = s.Import(t.Context(), bytes.NewReader(taggedArchive(t, tags[:1])))
	must(t, err)
	one, err := s.find(tags[0])
	must(t, err)
	one.names = []string{"registry.example/first:1", ""}
	harness.Want(t, s.record(t.Context(), one) != nil, "a name of nothing was recorded")
	_, err = s.images.Get(s.scope(t.Context()), one.names[0])
	harness.Want(t, errdefs.IsNotFound(err), "one of the names was recorded: %v", err)
}

// transactions is the number of the database's last transaction.
func transactions(s *Store) (id int) {
	_ = s.db.View(func(tx *bolt.Tx) error {
		id = tx.ID()
		return nil
	})
	return id
}
