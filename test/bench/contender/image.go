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
	"github.com/minicri/minicri/test/hostile/registry"
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
	app := []registry.Entry{registry.File(App[1:], 0o755, string(program)), registry.File("bin/busybox", 0o755, string(box))}
	for _, dir := range []string{"bin", "dev", "etc", "proc", "sys", "tmp"} {
		app = append(app, registry.Dir(dir, 0o755, 0))
	}
	for _, applet := range []string{"sh", "true"} {
		app = append(app, registry.Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + applet, Linkname: "busybox"}})
	}
	Check(tarball.MultiWriteToFile(path, map[name.Tag]v1.Image{
		Must(name.NewTag(Image)):      imageOf(v1.Config{Entrypoint: []string{App}, Env: []string{"PATH=/bin"}}, layerOf(app...)),
		Must(name.NewTag(pauseImage)): imageOf(v1.Config{Entrypoint: []string{"/pause"}}, layerOf(registry.File("pause", 0o755, string(program)))),
	}))
}

// imageOf is an image for this machine.
func imageOf(config v1.Config, layers ...v1.Layer) v1.Image {
	img := Must(mutate.AppendLayers(empty.Image, layers...))
	file := Must(img.ConfigFile()).DeepCopy()
	file.OS, file.Architecture, file.Config = "linux", runtime.GOARCH, config
	return Must(mutate.ConfigFile(img, file))
}

// layerOf is a layer of these entries.
func layerOf(entries ...registry.Entry) v1.Layer {
	data := registry.Layer(entries...)
	return Must(tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil },
		tarball.WithCompressionLevel(gzip.DefaultCompression)))
}
