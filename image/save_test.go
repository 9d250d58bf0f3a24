package image

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// A saved image is the same files in the same layers, on another node too.
func TestSavedImageIsImported(t *testing.T) {
	s, other, registry := openStore(t), openStore(t), newTestRegistry(t)
	reference := registry.push(t, "saved:1", everything(t))
	pull(t, s, reference)
	var archive bytes.Buffer
	must(t, s.Save(t.Context(), reference, &archive))
	imported, err := other.Import(t.Context(), &archive)
	must(t, err)
	harness.Want(t, len(imported) == 1 && slices.Equal(imported[0].RepoTags, []string{reference}) && imported[0].UserText == "web:www",
		"imported: %+v", imported)
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
	harness.Want(t, len(imported) == 1 && imported[0].ID == image.ID && imported[0].Target == image.Target && collected(t, other).blobs == 5,
		"%+v became %+v", image, imported)
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
	_, err := s.Tag(t.Context(), image.ID[7:20], "example.org/named:2")
	harness.Check(t, err)
	for name, is := range map[string]func(error) bool{"no/such:1": errdefs.IsNotFound, "A B": errdefs.IsInvalidArgument} {
		_, err := s.Tag(t.Context(), name, "example.org/other:1")
		harness.Want(t, is(err), "tag %s: %v", name, err)
	}
	_, err = s.Tag(t.Context(), reference, "example.org/a@"+image.Target.String())
	harness.Want(t, errdefs.IsInvalidArgument(err), "tag with a digest: %v", err)
	untag(t, s, reference)
	s = reopened(t, s) // the name is on the disk
	got, err := s.Get("example.org/named:2")
	harness.Want(t, err == nil && got.ID == image.ID && len(got.RepoTags) == 1, "named: %+v, %v", got, err)
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
	checkRefused(t, s, registry.push(t, "foreign:1", foreign), Auth{}, errdefs.IsNotFound, "linux/s390x")
	got, err := s.PullFor(t.Context(), reference, "linux/s390x", Auth{}, nil)
	harness.Want(t, err == nil && got.ID == idOf(t, foreign) && got.Target.String() == digestOf(t, foreign), "%+v, %v", got, err)
	checkLeft(t, s, leftovers{blobs: 5, snapshots: 2, records: 2}) // of both platforms
	mine, err := s.Get(other)
	harness.Want(t, err == nil && mine.ID == idOf(t, own), "the node's own: %+v, %v", mine, err)
	single := registry.push(t, "single:1", own)
	for platform, from := range map[string][2]string{"linux/mips": {reference, "no match for platform"}, "linux/": {reference, "platform"}, "linux/s390x": {single, "not for linux/s390x"}} {
		_, err := s.PullFor(t.Context(), from[0], platform, Auth{}, nil)
		harness.Want(t, err != nil && strings.Contains(err.Error(), from[1]), "%s: %v", platform, err)
	}
}
