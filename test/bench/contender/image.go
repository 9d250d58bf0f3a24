package contender

import (
	"archive/tar"
	"bytes"
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
	// pauseImage is minicri's own pause program, for runtimes that want an
	// image.
	pauseImage = "bench.example/pause:1"
	// App is a program that sleeps, and ends at SIGTERM.
	App = "/app"

	busybox = "/bin/busybox" // Debian's busybox-static
)

var applets = []string{"sh", "true"}

// writeImages writes an archive of both images, as docker save does.
func writeImages(path string) error {
	app := Must(appImage())
	program := Must(pause.Binary())
	sandbox := Must(imageOf(func(l *layer) { l.file("pause", 0o755, program) }, "/pause"))
	images := map[string]v1.Image{}
	images[Image], images[pauseImage] = app, sandbox
	tags := map[name.Tag]v1.Image{}
	for text, image := range images {
		tag := Must(name.NewTag(text))
		tags[tag] = image
	}
	return tarball.MultiWriteToFile(path, tags)
}

func appImage() (v1.Image, error) {
	box, err := os.ReadFile(busybox)
	if err != nil {
		return nil, fmt.Errorf("%w: run make setup", err)
	}
	app := Must(pause.Binary())
	return imageOf(func(l *layer) {
		for _, dir := range []string{"bin", "dev", "etc", "proc", "sys", "tmp"} {
			l.add(&tar.Header{Typeflag: tar.TypeDir, Name: dir, Mode: 0o755}, nil)
		}
		l.file("bin/busybox", 0o755, box)
		for _, applet := range applets {
			l.add(&tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + applet, Linkname: "busybox"}, nil)
		}
		l.file(App[1:], 0o755, app)
	}, App)
}

// imageOf is an image of one layer, for this machine.
func imageOf(fill func(*layer), program string) (v1.Image, error) {
	l := &layer{}
	l.writer = tar.NewWriter(&l.buffer)
	fill(l)
	_ = l.writer.Close() // a buffer takes all
	made, err := tarball.LayerFromOpener(func() (io.ReadCloser, error) {
		return io.NopCloser(bytes.NewReader(l.buffer.Bytes())), nil
	})
	if err != nil {
		return nil, err
	}
	img := Must(mutate.AppendLayers(empty.Image, made))
	config := Must(img.ConfigFile())
	config = config.DeepCopy()
	config.OS, config.Architecture = "linux", runtime.GOARCH
	config.Config.Entrypoint, config.Config.Env = []string{program}, []string{"PATH=/bin"}
	return mutate.ConfigFile(img, config)
}

type layer struct {
	buffer bytes.Buffer
	writer *tar.Writer
}

func (l *layer) add(header *tar.Header, content []byte) {
	_ = l.writer.WriteHeader(header)
	_, _ = l.writer.Write(content)
}

func (l *layer) file(name string, mode int64, content []byte) {
	l.add(&tar.Header{Typeflag: tar.TypeReg, Name: name, Mode: mode, Size: int64(len(content))}, content)
}
