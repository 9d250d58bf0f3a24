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
	"slices"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/layout"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

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
	flipped := bytes.Clone(whole)
	flipped[len(flipped)/2] ^= 1 // in the layer
	for title, archive := range map[string]io.Reader{
		"cut":        bytes.NewReader(whole[:len(whole)/2]),
		"no archive": strings.NewReader("hello"),
		"empty":      strings.NewReader(""),
		"wrong byte": bytes.NewReader(flipped),
	} {
		_, err := s.Import(t.Context(), archive)
		harness.Want(t, errdefs.IsInvalidArgument(err), "%s: %v", title, err)
	}
	checkLeft(t, s, leftovers{})
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

// attack: images: an archive gives one image 20,000 tags, with and without one that cannot be recorded
// held: all tags or none are imported, in one transaction of seconds
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
	harness.Need(t, err == nil && len(imported) == 1, "%d images: %v", len(imported), err)
	harness.Need(t, len(imported[0].RepoTags) == count, "%d images: %v", len(imported), err)
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

// A saved image is the same files in the same layers, on another node too.
func TestSavedImageIsImported(t *testing.T) {
	s, other, registry := openStore(t), openStore(t), newTestRegistry(t)
	reference := registry.push(t, "saved:1", everything(t))
	pull(t, s, reference)
	var archive bytes.Buffer
	must(t, s.Save(t.Context(), reference, &archive))
	imported, err := other.Import(t.Context(), &archive)
	must(t, err)
	harness.Need(t, len(imported) == 1, "imported: %+v", imported)
	harness.Want(t, slices.Equal(imported[0].RepoTags, []string{reference}), "imported: %+v", imported)
	harness.Want(t, imported[0].UserText == "web:www", "imported: %+v", imported)
	again, err := other.Get(reference)
	must(t, err)
	harness.Want(t, len(again.Spec.RootFS.DiffIDs) == 3 && again.Spec.Config.StopSignal == "SIGQUIT", "configuration: %+v", again.Spec)
	checkEverything(t, mountImage(t, other, again))
	checkLeft(t, s, leftovers{blobs: 2, snapshots: 3, records: 1})
	harness.Same(t, "mounts", entries(t, filepath.Join(s.dir, "mounts")), 0)
}

// TestKeptLayersAreSaved: the archive has the registry's bytes, unless a layer was unpacked before layers were kept.
func TestKeptLayersAreSaved(t *testing.T) {
	keep := func(c *Config) { c.KeepLayers = true }
	s, other, registry := openStore(t, keep), openStore(t, keep), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "kept:1", everything(t)))
	checkLeft(t, s, leftovers{blobs: 5, snapshots: 3, records: 1}) // three layers, manifest and configuration
	var archive bytes.Buffer
	must(t, s.Save(t.Context(), image.ID, &archive))
	imported, err := other.Import(t.Context(), &archive)
	must(t, err)
	harness.Need(t, len(imported) == 1, "%+v became %+v", image, imported)
	harness.Want(t, imported[0].ID == image.ID, "%+v became %+v", image, imported)
	harness.Want(t, imported[0].Target == image.Target, "%+v became %+v", image, imported)
	harness.Want(t, collected(t, other).blobs == 5, "%+v became %+v", image, imported)
	must(t, s.Remove(t.Context(), image.ID))
	checkLeft(t, s, leftovers{})

	late, below := openStore(t), layerOf(t, file("a", "1"))
	pull(t, late, registry.push(t, "below:1", imageOf(t, v1.Config{}, below)))
	collected(t, late)
	late.Reconfigure(Config{KeepLayers: true})
	image = pull(t, late, registry.push(t, "above:1", imageOf(t, v1.Config{}, below, layerOf(t, file("b", "2")))))
	collected(t, late)
	archive.Reset()
	must(t, late.Save(t.Context(), image.ID, &archive))
	imported, err = other.Import(t.Context(), &archive)
	harness.Want(t, err == nil && len(imported) == 1, "of an image with a layer that was not kept: %+v, %v", imported, err)
}

// What a killed save had mounted is gone when the store is opened again.
func TestKilledSaveLeavesNoMount(t *testing.T) {
	s := openStore(t)
	target := filepath.Join(s.dir, "mounts", "containerd-mount1")
	must(t, errors.Join(os.Mkdir(target, 0o700), unix.Mount(t.TempDir(), target, "", unix.MS_BIND, "")))
	reopened(t, s)
	harness.Want(t, entries(t, filepath.Join(s.dir, "mounts")) == 0, "%s is still mounted", target)
}

func TestTagGivesOneMoreName(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	reference := registry.push(t, "tagged:1", smallImage(t))
	image := pull(t, s, reference)
	must(t, s.Tag(t.Context(), image.ID[7:20], "example.org/named:2"))
	for name, is := range map[string]func(error) bool{"no/such:1": errdefs.IsNotFound, "A B": errdefs.IsInvalidArgument} {
		err := s.Tag(t.Context(), name, "example.org/other:1")
		harness.Want(t, is(err), "tag %s: %v", name, err)
	}
	err := s.Tag(t.Context(), reference, "example.org/a@"+image.Target.String())
	harness.Want(t, errdefs.IsInvalidArgument(err), "tag with a digest: %v", err)
	untag(t, s, reference)
	s = reopened(t, s) // the name is on the disk
	got, err := s.Get("example.org/named:2")
	harness.Need(t, err == nil, "named: %+v, %v", got, err)
	harness.Want(t, got.ID == image.ID, "named: %+v, %v", got, err)
	harness.Want(t, len(got.RepoTags) == 1, "named: %+v, %v", got, err)
	mountImage(t, s, image)
}

// Of an index the node's platform is pulled; an image of another one is for those who emulate it, or save it.
func TestPullForAPlatform(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	layer := layerOf(t, file("a", "foreign"))
	own, foreign := imageOf(t, v1.Config{}, layerOf(t, file("a", "own"))), imageFor(t, "s390x", v1.Config{}, layer)
	index := mutate.AppendManifests(empty.Index,
		mutate.IndexAddendum{Add: foreign, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: "s390x"}}},
		mutate.IndexAddendum{Add: own, Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "linux", Architecture: nodePlatformArch()}}})
	reference, other := registry.push(t, "multi:1", index), registry.push(t, "multi:2", index)
	image := pull(t, s, other)
	harness.Want(t, image.ID == idOf(t, own) && image.Target.String() == digestOf(t, index), "id %s target %s", image.ID, image.Target)
	harness.Same(t, "the foreign platform's layer was fetched", registry.blobGets(digestOf(t, layer)), nil)
	got, err := s.PullFor(t.Context(), reference, "linux/s390x", Auth{}, nil)
	harness.Need(t, err == nil, "%+v, %v", got, err)
	harness.Want(t, got.ID == idOf(t, foreign), "%+v, %v", got, err)
	harness.Want(t, got.Target.String() == digestOf(t, foreign), "%+v, %v", got, err)
	checkLeft(t, s, leftovers{blobs: 5, snapshots: 2, records: 2}) // of both platforms
	mine, err := s.Get(other)
	harness.Want(t, err == nil && mine.ID == idOf(t, own), "the node's own: %+v, %v", mine, err)
	single := registry.push(t, "single:1", own)
	for platform, from := range map[string][2]string{"linux/mips": {reference, "not for linux/mips"}, "linux/": {reference, "platform"}, "linux/s390x": {single, "not for linux/s390x"}} {
		_, err := s.PullFor(t.Context(), from[0], platform, Auth{}, nil)
		harness.Want(t, err != nil && strings.Contains(err.Error(), from[1]), "%s: %v", platform, err)
	}
}
