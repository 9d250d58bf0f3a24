package hostile

import (
	"errors"
	"io"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
)

// packed makes an image of compressed layers.
func packed(t testing.TB, content *registry.Registry, name, mediaType string, plain func() io.Reader, layers ...[]byte) {
	t.Helper()
	digester := digest.Canonical.Digester()
	_, err := io.Copy(digester.Hash(), plain())
	check(t, err)
	var diffIDs []digest.Digest
	m := ocispec.Manifest{MediaType: ocispec.MediaTypeImageManifest}
	m.SchemaVersion = 2
	for _, layer := range layers {
		diffIDs = append(diffIDs, digester.Digest())
		m.Layers = append(m.Layers, content.Blob(mediaType, layer))
	}
	m.Config = content.Configuration(ocispec.ImageConfig{}, diffIDs)
	content.Manifest(name, m.MediaType, m)
}

// attack: images: through the daemon: zstd layers that want windows of 512 MiB, two that want 128 MiB and fill them, 136 MiB of zeros by gzip, 200 directories with a comment of 1 MiB each
// held: the first is refused by its window; for none of them the daemon grows by 64 MiB
// field: containerd grows by 1 GiB for each layer of the first
func TestLayersCostLittleMemory(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox() // makes the directories of the image store
	content, host := newRegistry(t, n)
	const size = 136 << 20
	zeros := func(size int64) func() io.Reader { return func() io.Reader { return registry.Zeros(size) } }
	// Of sizes of their own: a layer that is there, or not yet removed, is not unpacked again.
	window, large, gzip := zeros(size), zeros(size+1<<20), zeros(size+2<<20)
	other := registry.Zstd(large(), 26) // the same files, in other bytes
	packed(t, content, "window:1", ocispec.MediaTypeImageLayerZstd, window, registry.Zstd(window(), 29))
	packed(t, content, "large:1", ocispec.MediaTypeImageLayerZstd, large, registry.Zstd(large(), 27), other)
	packed(t, content, "gzip:1", ocispec.MediaTypeImageLayerGzip, gzip, registry.Gzip(gzip()))
	headers := func() io.Reader { return registry.LongHeaders(200) }
	packed(t, content, "headers:1", ocispec.MediaTypeImageLayerGzip, headers, registry.Gzip(headers()))
	for name, word := range map[string]string{"window": "window of a frame is larger than 128 MiB", "large": "", "gzip": "", "headers": ""} {
		most := mostMemory(t, n)
		_, err := pull(t, n, host+"/"+name+":1", nil)
		grown := most()
		t.Logf("%s: the daemon has grown by %d MiB", name, grown>>20)
		if word == "" {
			check(t, err)
		} else if err == nil || !strings.Contains(err.Error(), word) || status.Code(err) == codes.Unknown {
			t.Errorf("%s: %v, want %q", name, err, word)
		}
		if grown > 64<<20 {
			t.Errorf("%s: the daemon has grown by %d MiB", name, grown>>20)
		}
		_, err = n.Image.RemoveImage(limited(t), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: host + "/" + name + ":1"}})
		check(t, err)
	}
}

// mostMemory watches the daemon's memory until it is asked by how much it has grown.
func mostMemory(t testing.TB, n *harness.Node) (grown func() int64) {
	t.Helper()
	before := residentMemory(t, n)
	stop, most := make(chan struct{}), make(chan int64)
	go func() {
		largest := before
		for {
			select {
			case <-stop:
				most <- largest
				return
			case <-time.After(5 * time.Millisecond):
				largest = max(largest, residentMemory(t, n))
			}
		}
	}()
	return func() int64 { close(stop); return <-most - before }
}

// attack: containers: 30000 directories within each other in the writable layer, and 50 MB in the last
// held: they count in the container's disk usage, and are removed with the container
// field: containerd and CRI-O measure by paths, which end at PATH_MAX, and remove with a descriptor for each level
func TestDeepTreeOfAContainer(t *testing.T) {
	const depth, size = 30000, 50 << 20
	n := harness.NewNode(t)
	n.ImportBusybox()
	p := newTenant(t, n, "deep")
	id := p.run("c")
	makeDeep(t, filepath.Join(n.State, "containers", id, "rootfs"), depth, size)
	began := time.Now()
	for usage := uint64(0); usage < size; {
		if time.Since(began) > patience {
			t.Fatalf("the container's usage is %d bytes after %v", usage, patience)
		}
		answer, err := n.Runtime.ContainerStats(limited(t), &runtimeapi.ContainerStatsRequest{ContainerId: id})
		check(t, err)
		usage = answer.GetStats().GetWritableLayer().GetUsedBytes().GetValue()
		time.Sleep(100 * time.Millisecond)
	}
	t.Logf("measured after %v", time.Since(began))
	before := layers(t, n)
	_, err := n.Runtime.RemovePodSandbox(limited(t), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.id})
	check(t, err)
	for began = time.Now(); layers(t, n) >= before; time.Sleep(100 * time.Millisecond) {
		if time.Since(began) > 10*patience {
			t.Fatal("the layer is still there")
		}
	}
	t.Logf("removed after %v", time.Since(began))
}

// makeDeep does what a program in a container would: directories within each other,
// and a file in the last.
func makeDeep(t testing.TB, top string, depth, size int) {
	t.Helper()
	const directory = unix.O_RDONLY | unix.O_DIRECTORY | unix.O_CLOEXEC
	at, err := unix.Open(top, directory, 0)
	check(t, err)
	for range depth {
		check(t, unix.Mkdirat(at, "d", 0o755))
		next, err := unix.Openat(at, "d", directory, 0)
		check(t, err)
		check(t, unix.Close(at))
		at = next
	}
	last, err := unix.Openat(at, "last", unix.O_CREAT|unix.O_WRONLY|unix.O_CLOEXEC, 0o644)
	check(t, err)
	_, err = unix.Write(last, make([]byte, size))
	check(t, err)
	check(t, errors.Join(unix.Close(last), unix.Close(at)))
}

// layers counts the layers that are on the disk.
func layers(t testing.TB, n *harness.Node) int {
	t.Helper()
	all, err := os.ReadDir(filepath.Join(n.Root, "image", "overlayfs", "snapshots"))
	check(t, err)
	return len(all)
}
