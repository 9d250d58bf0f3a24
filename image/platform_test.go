package image

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"runtime"
	"slices"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/minicri/minicri/test/harness"
)

const (
	flagsV1 = "processor\t: 0\nflags\t\t: fpu vme sse sse2 ht syscall nx lm\n"
	flagsV2 = "vendor_id\t: x\nflags\t\t: fpu cx16 lahf_lm popcnt pni sse4_1 sse4_2 ssse3 avx\n"
	ofV3    = " ssse3 avx avx2 bmi1 bmi2 f16c fma abm movbe xsave"
	flagsV3 = "model\t: x\nflags\t\t: cx16 lahf_lm popcnt pni sse4_1 sse4_2" + ofV3 + "\nvmx flags\t: x\n"
	flagsV4 = "a\nflags : cx16 lahf_lm popcnt pni sse4_1 sse4_2" + ofV3 +
		" avx512f avx512bw avx512cd avx512dq avx512vl\n"
)

func TestVariantOfAProcessor(t *testing.T) {
	for text, want := range map[string]string{"": "", flagsV1: "", flagsV2: "v2", flagsV3: "v3", flagsV4: "v4"} {
		harness.Same(t, text, variantOf([]byte(text)), want)
	}
}

// An index's best entry for an amd64/v3 processor, and for one that has no variant.
func TestBestVariantIsChosen(t *testing.T) {
	for _, test := range []struct {
		variant string
		offered []string
		want    string
	}{
		{"v3", []string{"amd64", "amd64/v2", "amd64/v3", "amd64/v4"}, "amd64/v3"},
		{"v3", []string{"amd64/v4", "amd64"}, "amd64"},
		{"v3", []string{"386", "amd64/v2"}, "amd64/v2"},
		{"v3", []string{"arm64", "386"}, "386"},
		{"v3", []string{"amd64/v4"}, ""},
		{"", []string{"amd64/v2", "amd64/v1"}, "amd64/v1"},
		{"", []string{"amd64/v2"}, ""},
	} {
		node := platforms.Only(ocispec.Platform{OS: "linux", Architecture: "amd64", Variant: test.variant})
		best := ""
		for _, one := range test.offered {
			p := platforms.MustParse("linux/" + one)
			if node.Match(p) && (best == "" || node.Less(p, platforms.MustParse("linux/"+best))) {
				best = one
			}
		}
		harness.Same(t, test.variant, best, test.want)
	}
}

func platformOf(text string) *v1.Platform {
	p := platforms.MustParse(text)
	return &v1.Platform{OS: p.OS, Architecture: p.Architecture, Variant: p.Variant}
}

// TestTheIndexDecides: its entry counts, and not the platform that a builder left in the configuration.
func TestTheIndexDecides(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	node := platforms.Format(ownPlatform())
	configured := func(change func(*v1.ConfigFile)) v1.Image {
		img := imageOf(t, v1.Config{}, layerOf(t, file("a", "1")))
		spec, err := img.ConfigFile()
		must(t, err)
		spec = spec.DeepCopy()
		change(spec)
		img, err = mutate.ConfigFile(img, spec)
		must(t, err)
		return img
	}
	attestation := mutate.IndexAddendum{
		Add:        configured(func(c *v1.ConfigFile) { c.OS, c.Architecture = "unknown", "unknown" }),
		Descriptor: v1.Descriptor{Platform: &v1.Platform{OS: "unknown", Architecture: "unknown"}},
	}
	for _, test := range []struct {
		name    string
		change  func(*v1.ConfigFile)
		listed  *v1.Platform
		refused bool
	}{
		{"another architecture", func(c *v1.ConfigFile) { c.Architecture = "s390x" }, platformOf(node), false},
		{"another variant", func(c *v1.ConfigFile) { c.Variant = "v9" }, platformOf(node), false},
		{"another system", func(c *v1.ConfigFile) { c.OS = "darwin" }, platformOf(node), false},
		{"none below", func(c *v1.ConfigFile) { c.OS, c.Architecture = "", "" }, platformOf(node), false},
		{"none in the index", func(*v1.ConfigFile) {}, nil, false},
		{"an empty one in the index", func(*v1.ConfigFile) {}, &v1.Platform{}, false},
		{"none in the index, another below", func(c *v1.ConfigFile) { c.Architecture = "s390x" }, nil, true},
	} {
		t.Run(test.name, func(t *testing.T) {
			img := configured(test.change)
			index := mutate.AppendManifests(
				empty.Index,
				attestation,
				mutate.IndexAddendum{Add: img, Descriptor: v1.Descriptor{Platform: test.listed}},
			)
			reference := registry.push(t, "listed:1", index)
			if test.refused {
				checkRefused(
					t,
					s,
					reference,
					Auth{},
					errdefs.IsNotFound,
					"the image is for linux/s390x, not for this node, a linux/"+runtime.GOARCH,
				)
				return
			}
			mountImage(t, s, pull(t, s, reference))
			remove(t, s, reference)
		})
	}
	// Without an index other runtimes pull the image, too: an emulator may run it.
	foreign := pull(t, s, registry.push(t, "single:1", configured(func(c *v1.ConfigFile) { c.Architecture = "s390x" })))
	mountImage(t, s, foreign)
	checkRefused(
		t,
		s,
		registry.push(t, "single:2", configured(func(c *v1.ConfigFile) { c.OS = "windows" })),
		Auth{},
		errdefs.IsNotFound,
		"the image is for windows/",
	)
	others := mutate.AppendManifests(
		empty.Index,
		attestation,
		mutate.IndexAddendum{Add: attestation.Add, Descriptor: v1.Descriptor{Platform: platformOf("linux/s390x")}},
		mutate.IndexAddendum{Add: attestation.Add, Descriptor: v1.Descriptor{Platform: platformOf("linux/mips64le")}},
	)
	checkRefused(
		t,
		s,
		registry.push(t, "others:1", others),
		Auth{},
		errdefs.IsNotFound,
		"the image is for linux/s390x, linux/mips64le, not for this node, a linux/"+runtime.GOARCH,
	)
	checkRefused(
		t,
		s,
		registry.push(t, "none:1", mutate.AppendManifests(empty.Index, attestation)),
		Auth{},
		errdefs.IsNotFound,
		"lists no image",
	)
}

// Builders have called the configuration of a schema 2 image by other types. Docker takes them.
func TestTypesOfConfigurations(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	for _, kind := range []types.MediaType{"application/octet-stream", "application/json", "text/html", ""} {
		img := dockerImageOf(
			t,
			v1.Config{Labels: map[string]string{"k": string(kind)}},
			gzipLayer(t, tarOf(t, file("a", "1")), types.DockerLayer),
		)
		manifest, err := img.Manifest()
		must(t, err)
		registry.push(t, "typed:0", img)
		manifest = manifest.DeepCopy()
		manifest.Config.MediaType = kind
		pull(t, s, registry.name("typed:1", string(manifest.MediaType), manifest))
		manifest.MediaType = types.OCIManifestSchema1
		checkRefused(
			t,
			s,
			registry.name("typed:2", string(manifest.MediaType), manifest),
			Auth{},
			errdefs.IsInvalidArgument,
			"artifact",
		)
	}
	must(t, s.Collect(t.Context()))
	harness.Same(t, "images after a collection", len(reopened(t, s).List()), 4)
}

// layoutOf is an OCI archive whose index.json lists images flat, with these names and platforms.
func layoutOf(t *testing.T, listed []ocispec.Descriptor, imgs ...v1.Image) []byte {
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	add := func(name string, data []byte) {
		must(t, w.WriteHeader(&tar.Header{Name: name, Mode: 0o644, Size: int64(len(data))}))
		_, err := w.Write(data)
		must(t, err)
	}
	index := ocispec.Index{Versioned: specs.Versioned{SchemaVersion: 2}}
	for i, img := range imgs {
		manifest, err := img.RawManifest()
		must(t, err)
		config, err := img.RawConfigFile()
		must(t, err)
		layers, err := img.Layers()
		must(t, err)
		for _, layer := range layers {
			data, err := layer.Uncompressed()
			must(t, err)
			var plain bytes.Buffer
			_, err = plain.ReadFrom(data)
			must(t, err)
			add("blobs/sha256/"+digest.FromBytes(plain.Bytes()).Encoded(), plain.Bytes())
		}
		for _, data := range [][]byte{manifest, config} {
			add("blobs/sha256/"+digest.FromBytes(data).Encoded(), data)
		}
		one := listed[i]
		one.MediaType, one.Digest, one.Size = ocispec.MediaTypeImageManifest, digest.FromBytes(
			manifest,
		), int64(
			len(manifest),
		)
		index.Manifests = append(index.Manifests, one)
	}
	data, err := json.Marshal(index)
	must(t, err)
	add("oci-layout", []byte(`{"imageLayoutVersion":"1.0.0"}`))
	add("index.json", data)
	must(t, w.Close())
	return buffer.Bytes()
}

func TestImportOfSeveralPlatforms(t *testing.T) {
	own, foreign := imageOf(
		t,
		v1.Config{},
		plainLayer(tarOf(t, file("a", "own"))),
	), imageFor(
		t,
		"s390x",
		v1.Config{},
		plainLayer(tarOf(t, file("a", "foreign"))),
	)
	second := imageOf(t, v1.Config{}, plainLayer(tarOf(t, file("a", "second"))))
	named := map[string]string{ocispec.AnnotationRefName: "example.org/app:1"}
	node, other := ownPlatform(), ocispec.Platform{OS: "linux", Architecture: "s390x"}
	type listed = []ocispec.Descriptor
	type all = []v1.Image
	for _, test := range []struct {
		name   string
		listed []ocispec.Descriptor
		imgs   []v1.Image
		want   []v1.Image
	}{
		{
			"named, with platforms",
			listed{{Annotations: named, Platform: &other}, {Annotations: named, Platform: &node}},
			all{foreign, own},
			all{own},
		},
		{"named, without platforms", listed{{Annotations: named}, {Annotations: named}}, all{own, foreign}, all{own}},
		{"without names", listed{{}, {}, {}}, all{foreign, own, second}, all{own, second}},
		{"another platform alone", listed{{Annotations: named}}, all{foreign}, all{foreign}},
		{"one with a name, another without", listed{{Annotations: named}, {}}, all{own, foreign}, all{own, foreign}},
	} {
		s := openStore(t)
		imported, err := s.Import(t.Context(), bytes.NewReader(layoutOf(t, test.listed, test.imgs...)))
		var got, want []string
		for _, one := range imported {
			got = append(got, one.ID)
		}
		for _, img := range test.want {
			want = append(want, idOf(t, img))
		}
		slices.Sort(got)
		slices.Sort(want)
		harness.Want(t, err == nil && slices.Equal(got, want), "%s: %v, %v, want %v", test.name, got, err, want)
	}
	_, err := openStore(
		t,
	).Import(t.Context(), bytes.NewReader([]byte("root:x:0:0:root:/root:/bin/sh\n"+string(make([]byte, 600)))))
	harness.WantError(t, err, "it is no tar archive")
}
