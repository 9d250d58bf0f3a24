package registry

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"fmt"
	"runtime"
	"strings"

	"github.com/opencontainers/go-digest"
	specs "github.com/opencontainers/image-spec/specs-go"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Layer is an uncompressed layer of the given entries; Body is what a regular
// file holds.
func Layer(entries ...Entry) []byte {
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	for _, e := range entries {
		e.Header.Size = int64(len(e.Body))
		if err := w.WriteHeader(&e.Header); err != nil {
			panic(err) // a mistake in the test
		}
		if _, err := w.Write([]byte(e.Body)); err != nil {
			panic(err)
		}
	}
	if err := w.Close(); err != nil {
		panic(err)
	}
	return buffer.Bytes()
}

// Entry is one of a layer.
type Entry struct {
	Header tar.Header
	Body   string
}

// File is a regular file.
func File(name string, mode int64, body string) Entry {
	return Entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: mode}, body}
}

// Dir is a directory of the user and group with one number.
func Dir(name string, mode int64, id int) Entry {
	return Entry{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: mode, Uid: id, Gid: id}, ""}
}

// Device is a character device.
func Device(name string, mode, major, minor int64) Entry {
	return Entry{tar.Header{Name: name, Typeflag: tar.TypeChar, Mode: mode, Devmajor: major, Devminor: minor}, ""}
}

// Image stores configuration and layers of an image for this machine and returns
// its manifest, for a test to spoil and to name.
func (r *Registry) Image(config ocispec.ImageConfig, layers ...[]byte) ocispec.Manifest {
	var diffIDs []digest.Digest
	manifest := ocispec.Manifest{Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageManifest}
	for _, layer := range layers {
		diffIDs = append(diffIDs, digest.FromBytes(layer))
		manifest.Layers = append(manifest.Layers, r.Blob(ocispec.MediaTypeImageLayer, layer))
	}
	manifest.Config = r.Configuration(config, diffIDs)
	return manifest
}

// Configuration stores the configuration of an image for this machine, with the
// digests of its plain layers.
func (r *Registry) Configuration(config ocispec.ImageConfig, diffIDs []digest.Digest) ocispec.Descriptor {
	data, err := json.Marshal(ocispec.Image{
		Platform: ocispec.Platform{OS: "linux", Architecture: runtime.GOARCH},
		Config:   config, RootFS: ocispec.RootFS{Type: "layers", DiffIDs: diffIDs},
	})
	must(err)
	return r.Blob(ocispec.MediaTypeImageConfig, data)
}

// Spoilt names the manifests of the images that are to be refused, each with
// what has to be in the error.
func (r *Registry) Spoilt() map[string]string {
	words := map[string]string{}
	spoil := func(name, word string, change func(m *ocispec.Manifest)) {
		m := r.Image(ocispec.ImageConfig{}, Layer(File("a", 0o644, name)))
		change(&m)
		r.Manifest(name+":1", m.MediaType, m)
		words[name] = word
	}
	spoil("encrypted", "encrypted images are not supported", func(m *ocispec.Manifest) { m.Layers[0].MediaType += "+encrypted" })
	spoil("foreign", "foreign layers are not supported", func(m *ocispec.Manifest) {
		m.Layers[0].MediaType = ocispec.MediaTypeImageLayerNonDistributable //nolint:staticcheck // it is what is refused
	})
	spoil("sha512", "sha512", func(m *ocispec.Manifest) { m.Layers[0].Digest = digest.SHA512.FromString("x") })
	spoil("path", "etc/passwd", func(m *ocispec.Manifest) { m.Layers[0].Digest = "sha256:../../../../etc/passwd" })
	spoil("size", "-5 bytes", func(m *ocispec.Manifest) { m.Layers[0].Size = -5 })
	spoil("endless", "9223372036854775807", func(m *ocispec.Manifest) { m.Layers[0].Size = 1<<63 - 1 })
	spoil("larger-than-the-disk", "are free", func(m *ocispec.Manifest) { m.Layers[0].Size = 1 << 60 })
	spoil("artifact", "application/vnd.example.model", func(m *ocispec.Manifest) {
		m.ArtifactType, m.Config = "application/vnd.example.model", r.Blob(ocispec.MediaTypeEmptyJSON, []byte("{}"))
	})
	spoil("layers", "600 layers", func(m *ocispec.Manifest) {
		for len(m.Layers) < 600 {
			m.Layers = append(m.Layers, m.Layers[0])
		}
	})
	spoil("history", "1048576", func(m *ocispec.Manifest) {
		m.Config = r.Blob(ocispec.MediaTypeImageConfig, []byte(`{"history":[`+strings.Repeat("{},", 5_500_000)+`{}]}`))
	})
	nested := r.Manifest("within:1", ocispec.MediaTypeImageManifest, r.Image(ocispec.ImageConfig{}, Layer(File("a", 0o644, "deep"))))
	for range 3000 {
		nested = r.Manifest("deep:1", ocispec.MediaTypeImageIndex, ocispec.Index{
			Versioned: specs.Versioned{SchemaVersion: 2}, MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{nested},
		})
	}
	words["deep"] = "nested more than"
	return words
}

// String names a request in a failure.
func (r Request) String() string { return fmt.Sprintf("%s %s", r.Method, r.Path) }
