package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io"
	"net/http"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/static"
	"github.com/google/go-containerregistry/pkg/v1/types"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
	hostile "github.com/minicri/minicri/test/hostile/registry"
)

// bomb is a layer that is small until it is unpacked.
func bomb(t testing.TB, kind types.MediaType, packed []byte, plain io.Reader) v1.Layer {
	hash, _, err := v1.SHA256(plain)
	must(t, err)
	return bombLayer{static.NewLayer(packed, kind), hash}
}

type bombLayer struct {
	v1.Layer
	diffID v1.Hash
}

func (l bombLayer) DiffID() (v1.Hash, error) { return l.diffID, nil }

// attack: images: layers of some KiB unpack to 256 MiB of zeros (gzip and zstd), to a sparse file of 1 TiB, or to more files than the disk has inodes
// held: it is refused by the size before the file is written; a twentieth of the disk always stays free; nothing remains
// field: containerd and CRI-O write until the disk is full
func TestWhatALayerUnpacksToIsBounded(t *testing.T) {
	const size = 256 << 20
	for name, test := range map[string]struct {
		layer v1.Layer
		word  string
	}{
		"gzip":   {bomb(t, types.OCILayer, hostile.Gzip(hostile.Zeros(size)), hostile.Zeros(size)), "has 268435456 bytes, and layers may take"},
		"zstd":   {bomb(t, types.OCILayerZStd, hostile.Zstd(hostile.Zeros(size), 20), hostile.Zeros(size)), "has 268435456 bytes, and layers may take"},
		"sparse": {bomb(t, types.OCILayer, hostile.Gzip(hostile.Sparse(1<<40)), hostile.Sparse(1<<40)), "has 1099511627776 bytes, and layers may take"},
		"inodes": {bomb(t, types.OCILayer, hostile.Gzip(hostile.EmptyFiles(20000)), hostile.EmptyFiles(20000)), "too many files"},
	} {
		t.Run(name, func(t *testing.T) {
			root, _ := newDisk(t, "64M") // with 16384 inodes
			s, registry := openStoreAt(t, root), newTestRegistry(t)
			reference := registry.push(t, "bomb:1", imageOf(t, v1.Config{}, test.layer))
			least := leastFree(t, root)
			checkRefused(t, s, reference, Auth{}, errdefs.IsResourceExhausted, test.word)
			bytes, inodes := least()
			t.Logf("at least %d bytes and %d inodes were free", bytes, inodes)
			harness.Want(t, bytes >= 2<<20 && inodes >= 700, "the disk was filled: %d bytes, %d inodes", bytes, inodes)
			checkLeft(t, s, leftovers{})
		})
	}
}

// attack: images: layers of some KiB stand for gigabytes behind the end of their archive, in headers, or in one file that is written again and again
// held: refused at 16 MiB behind the end, 512 MiB in no file, and when all files together are larger than the free space
// field: containerd decompresses and digests all of it
func TestWhatALayerIsDecompressedToIsBounded(t *testing.T) {
	again := func(times int) io.Reader {
		var all []io.Reader
		for range times {
			one, _ := io.ReadAll(hostile.Zeros(10 << 20))
			all = append(all, bytes.NewReader(one[:len(one)-1024]))
		}
		return io.MultiReader(append(all, bytes.NewReader(make([]byte, 1024)))...)
	}
	behind := func() io.Reader { return io.MultiReader(hostile.Zeros(1), io.LimitReader(zeroes{}, 40<<20)) }
	for _, test := range []struct {
		name  string
		plain func() io.Reader
		is    func(error) bool
		words string
	}{
		{"behind the end", behind, errdefs.IsInvalidArgument, "more than 16 MiB behind the end of its archive"},
		{"headers", func() io.Reader { return hostile.LongHeaders(530) }, errdefs.IsInvalidArgument, "that are in none of its"},
		{"one file again and again", func() io.Reader { return again(8) }, errdefs.IsResourceExhausted, "layers may take"},
	} {
		t.Run(test.name, func(t *testing.T) {
			root, _ := newDisk(t, "64M")
			s, registry := openStoreAt(t, root), newTestRegistry(t)
			// The digest of all plain bytes is not known before they are unpacked, nor needed for a refusal.
			layer := bomb(t, types.OCILayer, hostile.Gzip(test.plain()), strings.NewReader("x"))
			reference := registry.push(t, "bomb:1", imageOf(t, v1.Config{}, layer))
			checkRefused(t, s, reference, Auth{}, test.is, test.words)
			checkLeft(t, s, leftovers{})
		})
	}
	ctx, cancel := context.WithCancel(t.Context())
	endless := &countedReader{ctx: ctx, Reader: zeroes{}}
	_, err := endless.Read(make([]byte, 1))
	harness.Check(t, err)
	cancel()
	_, err = io.Copy(io.Discard, endless)
	harness.Want(t, errors.Is(err, context.Canceled), "an unpack without its caller: %v", err)
}

type zeroes struct{}

func (zeroes) Read(p []byte) (int, error) { clear(p); return len(p), nil }

// attack: images: an image names the layers of a popular one, and its own bytes take hours to decompress; two such images take all places of zstd decoders
// held: an unpack that moves less than 64 KiB/s of packed bytes is not waited for, and gives its place to the next
// field: containerd's other pulls wait
func TestSlowUnpackIsNotWaitedFor(t *testing.T) {
	all := &locks{byKey: map[string]*lock{}}
	attacker, victim := all.forPull(time.Millisecond), all.forPull(time.Millisecond)
	must(t, attacker.Lock(t.Context(), "a layer"))
	places := newPlaces()
	first, second, third := &place{places: places}, &place{places: places}, &place{places: places}
	must(t, errors.Join(first.take(t.Context()), second.take(t.Context())))
	var moved atomic.Int64
	ctx, cancel := context.WithCancel(t.Context())
	var watch sync.WaitGroup
	watch.Go(func() { attacker.watch(ctx, &moved, first.pass) })
	must(t, victim.Lock(t.Context(), "a layer"))
	must(t, third.take(t.Context()))
	cancel()
	watch.Wait()
	harness.Want(t, attacker.slow.Load() == 0, "the watch has left a mark")
	for _, one := range []*place{first, second, third} {
		one.end()
		one.pass() // again: no other's
	}
	harness.Want(t, places.quick.TryAcquire(maxZstd) && places.all.TryAcquire(maxZstd+slowZstd), "a place was not given back")
	ended, end := context.WithCancel(t.Context())
	end()
	harness.Want(t, (&place{places: places}).take(ended) != nil, "more decoders than places")
}

// leastFree watches a filesystem until it is asked what was free at the least.
func leastFree(t *testing.T, dir string) func() (bytes, inodes uint64) {
	var least unix.Statfs_t
	must(t, unix.Statfs(dir, &least))
	stop := again(t, func() {
		var now unix.Statfs_t
		_ = unix.Statfs(dir, &now)
		least.Bavail, least.Ffree = min(least.Bavail, now.Bavail), min(least.Ffree, now.Ffree)
	})
	return func() (bytes, inodes uint64) {
		stop()
		return least.Bavail * uint64(least.Bsize), least.Ffree
	}
}

// again does something again and again until it is stopped.
func again(t *testing.T, do func()) (stop func()) {
	ctx, cancel := context.WithCancel(context.Background())
	var wait sync.WaitGroup
	wait.Go(func() {
		for do(); ctx.Err() == nil; do() {
			runtime.Gosched()
		}
	})
	stop = func() { cancel(); wait.Wait() }
	t.Cleanup(stop)
	return stop
}

// attack: images: zstd layers require a window of 512 MiB, a segment of 1 GiB, or four windows of 128 MiB at once; a registry sends blobs with the content encoding zstd
// held: the first two and the last are refused; the others are decoded, two at a time, in processes of less than 192 MiB that the OOM killer chooses first
// field: containerd decodes all in its own process, in up to 1 GiB each
func TestZstdWindowsAreBounded(t *testing.T) {
	const size = 160 << 20
	for name, packed := range map[string][]byte{"window": hostile.Zstd(hostile.Zeros(1<<20), 29), "segment": hostile.ZstdSegment(1 << 30)} {
		plain, err := decompress(t.Context(), bytes.NewReader(packed), &place{places: newPlaces()})
		must(t, err)
		n, err := io.Copy(io.Discard, plain)
		harness.Want(t, n == 0, "%s: %d bytes, %v", name, n, err)
		harness.Want(t, err != nil, "%s: %d bytes, %v", name, n, err)
		harness.Want(t, strings.Contains(err.Error(), "window of a frame is larger than 128 MiB"),
			"%s: %d bytes, %v", name, n, err)
		plain.Close()
	}
	packed := hostile.Zstd(hostile.Zeros(size), 27)
	s, all := openStore(t), sync.WaitGroup{}
	for range 4 {
		all.Go(func() {
			plain, err := decompress(t.Context(), bytes.NewReader(packed), &place{places: s.zstd})
			if err != nil {
				t.Error(err)
				return
			}
			defer plain.Close()
			harness.Want(t, !s.zstd.quick.TryAcquire(maxZstd), "a decoder has taken no place")
			n, err := io.Copy(io.Discard, plain)
			harness.Want(t, n >= size && err == nil, "%d bytes, %v", n, err)
			usage := plain.(zstdDecoder).command.ProcessState.SysUsage().(*syscall.Rusage)
			harness.Want(t, usage.Maxrss <= maxDecoder, "a decoder took %d KiB", usage.Maxrss)
		})
	}
	all.Wait()
	harness.Want(t, s.zstd.quick.TryAcquire(maxZstd), "a place was not given back")
	s.zstd.quick.Release(maxZstd)

	registry := newTestRegistry(t)
	reference := registry.push(t, "encoded:1", smallImage(t))
	registry.breakWith(onBlob("", func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		harness.Want(t, !strings.Contains(r.Header.Get("Accept-Encoding"), "zstd"), "the registry is asked for zstd: %v", r.Header)
		w.Header().Set("Content-Encoding", "ZSTD")
		_, err := w.Write(hostile.Zstd(bytes.NewReader(wholeBody(origin, r)), 29))
		return err == nil
	}))
	checkRefused(t, s, reference, Auth{}, errdefs.IsInvalidArgument, "in the encoding zstd")
}

// A decoder that ends too early, or is not read to its end, leaves no process, and its error is that of the pull.
func TestZstdDecoderThatIsEnded(t *testing.T) {
	packed := hostile.Zstd(hostile.Zeros(64<<20), 20)
	begin := func(packed []byte) io.ReadCloser {
		plain, err := decompress(t.Context(), bytes.NewReader(packed), &place{places: newPlaces()})
		must(t, err)
		return plain
	}
	plain := begin(packed)
	must(t, plain.(zstdDecoder).command.Process.Signal(syscall.SIGKILL))
	_, err := io.Copy(io.Discard, plain)
	harness.Want(t, errdefs.IsResourceExhausted(err), "a decoder was killed: %v", err)
	plain = begin(packed)
	_, err = plain.Read(make([]byte, 1))
	harness.Check(t, err)
	plain.Close()
	harness.Want(t, plain.(zstdDecoder).command.ProcessState != nil, "the process has not ended")
	plain = begin(packed[:len(packed)/2])
	defer plain.Close()
	_, err = io.Copy(io.Discard, plain)
	harness.WantError(t, err, "unexpected EOF")
}

// attack: images: a layer of some KiB has 300 directories, each with a comment of 1 MiB
// held: comments are not kept; names and attributes take 128 MiB at most
// field: containerd keeps all comments until the layer is unpacked
func TestHeadersOfALayerAreNotKept(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	layer := bomb(t, types.OCILayer, hostile.Gzip(hostile.LongHeaders(300)), hostile.LongHeaders(300))
	reference := registry.push(t, "headers:1", imageOf(t, v1.Config{}, layer))
	var most int64 // that is no garbage
	stop := again(t, func() { most = max(most, heap()) })
	pull(t, s, reference)
	stop()
	t.Logf("at most %d MiB of heap", most>>20)
	harness.Want(t, most <= 100<<20, "more than 100 MiB of heap")
}

// attack: images: a hundred images have the largest accepted configuration, full of history, labels or environment
// held: they cost less than 20 MiB
// field: containerd keeps 16 MB of configuration as 500 MB each
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
	s = openStoreAt(t, filepath.Dir(s.dir))
	grown = heap() - before
	harness.Want(t, len(s.List()) == images && grown <= limit, "%d images take %d bytes of heap", len(s.List()), grown)
}

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
	harness.Need(t, err == nil, "before %+v, after %+v: %v", before, after, err)
	harness.Want(t, after.Bytes >= before.Bytes+1<<20, "before %+v, after %+v: %v", before, after, err)
	harness.Want(t, after.Inodes > before.Inodes, "before %+v, after %+v: %v", before, after, err)
}
