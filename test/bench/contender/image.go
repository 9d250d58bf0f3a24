package contender

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"runtime"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"

	"github.com/minicri/minicri/oci/pause"
)

const (
	// Image is what containers of benchmarks are made from: busybox and App.
	Image = "bench.example/app:1"
	// pauseImage is minicri's own pause program, for runtimes that want an image.
	pauseImage = "bench.example/pause:1"
	// App is a program that sleeps, and ends at SIGTERM.
	App = "/app"

	busybox = "/bin/busybox" // Debian's busybox-static
)

// writeImages writes an archive of both images, as docker save does.
func writeImages(path string) {
	program := Must(pause.Binary())
	box, err := os.ReadFile(busybox)
	if err != nil {
		Check(fmt.Errorf("%w: run make setup", err))
	}
	app, sandbox := NewLayer(), NewLayer()
	for _, dir := range []string{"bin", "dev", "etc", "proc", "sys", "tmp"} {
		app.add(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755}, nil)
	}
	app.File("bin/busybox", 0o755, box)
	for _, applet := range []string{"sh", "true"} {
		app.add(&tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + applet, Linkname: "busybox"}, nil)
	}
	app.File(App[1:], 0o755, program)
	sandbox.File("pause", 0o755, program)
	Check(tarball.MultiWriteToFile(path, map[name.Tag]v1.Image{
		Must(name.NewTag(Image)):      ImageOf(v1.Config{Entrypoint: []string{App}, Env: []string{"PATH=/bin"}}, app.Layer()),
		Must(name.NewTag(pauseImage)): ImageOf(v1.Config{Entrypoint: []string{"/pause"}}, sandbox.Layer()),
	}))
}

// ImageOf is an image for this machine.
func ImageOf(config v1.Config, layers ...v1.Layer) v1.Image {
	img := Must(mutate.AppendLayers(empty.Image, layers...))
	file := Must(img.ConfigFile()).DeepCopy()
	file.OS, file.Architecture, file.Config = "linux", runtime.GOARCH, config
	return Must(mutate.ConfigFile(img, file))
}

// Layer is a layer of an image that is being filled. A buffer takes all: nothing fails.
type Layer struct {
	buffer bytes.Buffer
	writer *tar.Writer
}

// NewLayer is an empty layer.
func NewLayer() *Layer {
	l := &Layer{}
	l.writer = tar.NewWriter(&l.buffer)
	return l
}

func (l *Layer) add(header *tar.Header, content []byte) {
	_ = l.writer.WriteHeader(header)
	_, _ = l.writer.Write(content)
}

// File adds a file.
func (l *Layer) File(name string, mode int64, content []byte) {
	l.add(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(content))}, content)
}

// Layer ends the layer.
func (l *Layer) Layer() v1.Layer {
	_ = l.writer.Close()
	return Must(tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(l.buffer.Bytes())), nil
	}, tarball.WithCompressionLevel(gzip.DefaultCompression)))
}
