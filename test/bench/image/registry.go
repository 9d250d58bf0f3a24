package main

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"log"
	"math/rand"
	"net"
	"net/http"
	"os"
	"path/filepath"
	"runtime"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/minicri/minicri/test/bench/contender"
)

// serveRegistry is a child: a registry in memory. It writes its address to
// dir/address.
func serveRegistry(ctx context.Context, dir string) error {
	listener := contender.Must(net.Listen("tcp", "127.0.0.1:0"))
	server := &http.Server{Handler: registry.New(registry.Logger(log.New(io.Discard, "", 0)))}
	stop := context.AfterFunc(ctx, func() { _ = server.Close() })
	defer stop()
	contender.Check(contender.WriteWhole(filepath.Join(dir, "address"), listener.Addr().String()))
	if err := server.Serve(listener); err != http.ErrServerClosed {
		return err
	}
	return nil
}

// benchRegistry is the registry as the benchmark sees it.
type benchRegistry struct {
	*contender.Process
	host string
}

func startRegistry(ctx context.Context, dir string) (*benchRegistry, error) {
	contender.Check(os.Mkdir(dir, 0o700))
	c := contender.Must(contender.StartSelf(ctx, "-registry="+dir))
	address, err := contender.WaitForFile(ctx, filepath.Join(dir, "address"))
	if err != nil {
		c.Stop()
		return nil, err
	}
	return &benchRegistry{Process: c, host: address}, nil
}

func (r *benchRegistry) push(path string, img v1.Image) (string, error) {
	reference := r.host + "/" + path
	ref := contender.Must(name.ParseReference(reference, name.Insecure))
	return reference, remote.Write(ref, img)
}

const (
	layers        = 8
	filesPerLayer = 1500
	bytesPerFile  = 16 << 10 // half of them do not compress
)

// pushBigImage pushes the image that is pulled, always the same bytes.
func (r *benchRegistry) pushBigImage() (reference, shape string, err error) {
	img, size := v1.Image(empty.Image), int64(0)
	for i := range layers {
		layer := contender.Must(layerOf(bigLayer(int64(i))))
		n := contender.Must(layer.Size())
		size += n
		img = contender.Must(mutate.AppendLayers(img, layer))
	}
	img = contender.Must(forThisNode(img, "bench"))
	reference, err = r.push("bench/big:1", img)
	shape = fmt.Sprintf("image: %d layers, %d files, %d MB compressed, %d MB unpacked",
		layers, layers*filesPerLayer, size/1e6, layers*filesPerLayer*bytesPerFile/1_000_000)
	return reference, shape, err
}

func bigLayer(seed int64) []byte {
	var buffer bytes.Buffer
	w, random := tar.NewWriter(&buffer), rand.New(rand.NewSource(seed))
	data := make([]byte, bytesPerFile)
	for i := range filesPerLayer {
		random.Read(data[:bytesPerFile/2])
		copy(data[bytesPerFile/2:], bytes.Repeat([]byte(fmt.Sprintf("line %d of a text\n", i)), bytesPerFile))
		header := &tar.Header{Name: fmt.Sprintf("usr/lib/part%d/dir%d/file%d", seed, i/50, i), Mode: 0o644, Size: bytesPerFile}
		_ = w.WriteHeader(header) // a buffer takes all
		_, _ = w.Write(data)
	}
	_ = w.Close()
	return buffer.Bytes()
}

func layerOf(plain []byte) (v1.Layer, error) {
	return tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(plain)), nil
	}, tarball.WithCompressionLevel(gzip.DefaultCompression))
}

// forThisNode gives an image the node's platform and a name that makes its id
// differ from others'.
func forThisNode(img v1.Image, label string) (v1.Image, error) {
	spec := contender.Must(img.ConfigFile())
	spec = spec.DeepCopy()
	spec.OS, spec.Architecture = "linux", runtime.GOARCH
	spec.Config.Labels = map[string]string{"bench": label}
	return mutate.ConfigFile(img, spec)
}
