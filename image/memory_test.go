package image

import (
	"fmt"
	"path/filepath"
	"runtime"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/minicri/minicri/test/harness"
)

// attack: images: a hundred images with the largest configuration that is accepted, all of it history, labels or environment
// held: less than 20 MiB of memory, and the daemon starts within a second
// field: containerd and minicri's first version kept 16 MB of configuration as 500 MB each
//
// The cost is that of each image, so a quarter of the hundred has to do with a quarter of the memory.
func TestLargestConfigurationsCostLittle(t *testing.T) {
	const images, limit = 25, 5 << 20
	s, registry := openStoreAt(t, inMemory(t)), newTestRegistry(t)
	layer := tarOf(t, file("a", "1"))
	references := make([]string, images)
	for i := range references {
		references[i] = registry.withLargeConfig(fmt.Sprintf("large%d", i), i, layer)
	}
	before := heap()
	for _, reference := range references {
		pull(t, s, reference)
	}
	grown := heap() - before
	harness.Want(t, grown <= limit, "%d pulled images take %d bytes of heap", images, grown)
	must(t, s.Close())
	before = heap()
	began := time.Now()
	s = openStoreAt(t, filepath.Dir(s.dir))
	took := time.Since(began)
	grown = heap() - before
	t.Logf("opened in %s, %d KiB of heap", took, grown>>10)
	harness.Want(t, len(s.List()) == images && grown <= limit, "%d images take %d bytes of heap", len(s.List()), grown)
	harness.Want(t, took <= time.Second*time.Duration(slowness), "opened in %s", took)
}

// slowness stretches the second on a machine that does more than this test.
const slowness = 30

func heap() int64 {
	runtime.GC()
	runtime.GC()
	var stats runtime.MemStats
	runtime.ReadMemStats(&stats)
	return int64(stats.HeapAlloc)
}

// withLargeConfig pushes an image whose configuration has just under 1 MiB, of one of three kinds.
func (r *testRegistry) withLargeConfig(repository string, i int, layer []byte) string {
	base := fmt.Sprintf(`{"os":"linux","architecture":%q,"rootfs":{"type":"layers","diff_ids":[%q]},`, nodePlatformArch(), digest.FromBytes(layer))
	room := maxConfig - len(base) - 100
	var config string
	switch i % 3 {
	case 0:
		config = base + fmt.Sprintf(`"comment":"%d","history":[%s{}]}`, i, strings.Repeat("{},", room/3))
	case 1:
		config = base + fmt.Sprintf(`"config":{"Labels":{"%d":%q}}}`, i, strings.Repeat("x", room))
	case 2:
		config = base + fmt.Sprintf(`"config":{"Env":[%s"I=%d"]}}`, strings.Repeat(`"A=bcd",`, room/8), i)
	}
	manifest := r.Image(ocispec.ImageConfig{}, layer)
	manifest.Config = r.Blob(ocispec.MediaTypeImageConfig, []byte(config))
	return r.name(repository+":1", manifest.MediaType, manifest)
}

// Volumes that an image declares are the container's own files, as its writable layer is.
func TestVolumesAreMeasuredWithTheLayer(t *testing.T) {
	volumes := t.TempDir()
	s, registry := openStore(t, func(c *Config) { c.VolumesDir = volumes }), newTestRegistry(t)
	image := pull(t, s, registry.push(t, "volumes:1", smallImage(t)))
	must(t, s.Prepare(t.Context(), "c1", image.ID, PrepareOptions{}))
	before, err := s.SnapshotUsage(t.Context(), "c1")
	must(t, err)
	mkdir(t, filepath.Join(volumes, "c1", "0"))
	writeFile(t, filepath.Join(volumes, "c1", "0", "data"), strings.Repeat("x", 1<<20))
	after, err := s.SnapshotUsage(t.Context(), "c1")
	harness.Want(t, err == nil && after.Bytes >= before.Bytes+1<<20 && after.Inodes > before.Inodes,
		"before %+v, after %+v: %v", before, after, err)
}
