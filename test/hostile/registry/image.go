package registry

import (
	"archive/tar"
	"bytes"
	"encoding/json"
	"runtime"

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
