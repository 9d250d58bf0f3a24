package image

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"io"
	"math/rand"
	"testing"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/klauspost/compress/zstd"
)

// entry is one file of a layer.
type entry struct {
	header tar.Header
	data   []byte
}

func file(name, data string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, []byte(data)}
}

func dir(name string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeDir, Mode: 0o755}, nil}
}

func hardlink(name, target string) entry {
	return entry{tar.Header{Name: name, Typeflag: tar.TypeLink, Linkname: target}, nil}
}

// noise is a file that does not compress; seed makes it the same each time.
func noise(name string, size int, seed int64) entry {
	data := make([]byte, size)
	rand.New(rand.NewSource(seed)).Read(data)
	return entry{tar.Header{Name: name, Typeflag: tar.TypeReg, Mode: 0o644}, data}
}

func tarOf(t testing.TB, entries ...entry) []byte {
	var buffer bytes.Buffer
	w := tar.NewWriter(&buffer)
	for _, e := range entries {
		e.header.Size = int64(len(e.data))
		e.header.Format = tar.FormatPAX
		must(t, w.WriteHeader(&e.header))
		_, err := w.Write(e.data)
		must(t, err)
	}
	must(t, w.Close())
	return buffer.Bytes()
}

// layerOf is a gzip layer in the OCI form.
func layerOf(t testing.TB, entries ...entry) v1.Layer {
	return gzipLayer(t, tarOf(t, entries...), types.OCILayer)
}

func gzipLayer(t testing.TB, plain []byte, media types.MediaType) v1.Layer {
	layer, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(plain)), nil
	}, tarball.WithMediaType(media), tarball.WithCompressionLevel(gzip.BestSpeed))
	must(t, err)
	return layer
}

// packedLayer is a layer whose stored bytes are the test's own: static layers
// know no difference between those and the unpacked ones, this one does.
type packedLayer struct {
	v1.Layer
	plain v1.Layer
}

func (l packedLayer) DiffID() (v1.Hash, error)             { return l.plain.Digest() }
func (l packedLayer) Uncompressed() (io.ReadCloser, error) { return l.plain.Compressed() }

func zstdLayer(t testing.TB, plain []byte) v1.Layer {
	w, err := zstd.NewWriter(nil)
	must(t, err)
	return packedLayer{
		Layer: static.NewLayer(w.EncodeAll(plain, nil), types.OCILayerZStd), plain: static.NewLayer(plain, types.OCIUncompressedLayer),
	}
}

func plainLayer(plain []byte) v1.Layer { return static.NewLayer(plain, types.OCIUncompressedLayer) }

// imageOf is an OCI image for the node's platform.
func imageOf(t testing.TB, config v1.Config, layers ...v1.Layer) v1.Image {
	return imageFor(t, nodePlatformArch(), config, layers...)
}

func imageFor(t testing.TB, architecture string, config v1.Config, layers ...v1.Layer) v1.Image {
	img := mutate.ConfigMediaType(mutate.MediaType(empty.Image, types.OCIManifestSchema1), types.OCIConfigJSON)
	return configured(t, img, architecture, config, layers...)
}

// dockerImageOf is a Docker schema 2 image.
func dockerImageOf(t testing.TB, config v1.Config, layers ...v1.Layer) v1.Image {
	return configured(t, empty.Image, nodePlatformArch(), config, layers...)
}

func configured(t testing.TB, img v1.Image, architecture string, config v1.Config, layers ...v1.Layer) v1.Image {
	img, err := mutate.AppendLayers(img, layers...)
	must(t, err)
	spec, err := img.ConfigFile()
	must(t, err)
	spec = spec.DeepCopy()
	spec.OS, spec.Architecture, spec.Config = "linux", architecture, config
	img, err = mutate.ConfigFile(img, spec)
	must(t, err)
	return img
}

func digestOf(t testing.TB, what interface{ Digest() (v1.Hash, error) }) string {
	hash, err := what.Digest()
	must(t, err)
	return hash.String()
}

func idOf(t testing.TB, img v1.Image) string {
	hash, err := img.ConfigName()
	must(t, err)
	return hash.String()
}
