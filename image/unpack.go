package image

import (
	"archive/tar"
	"bufio"
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"strings"
	"sync"
	"syscall"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/unpack"
	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/containerd/containerd/v2/pkg/archive/compression"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/klauspost/compress/gzip"
	"github.com/klauspost/compress/zstd"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"
)

// route says how an image is walked from its manifest or index to its layers.
type route struct {
	platform platforms.MatchComparer // orders the manifests of an index; one is taken
	wanted   string                  // the platform's name, "" for the node's
	get      images.HandlerFunc      // makes a blob present before it is read
	locks    *pullLocks
	report   func(desc ocispec.Descriptor, stage Stage, done int64)
}

// unpackTree walks from target to the configuration of one platform and unpacks its
// layers. After an error fetches may go on after it returns; their context has ended.
func (s *Store) unpackTree(ctx context.Context, target ocispec.Descriptor, route route) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	unpacker, err := unpack.NewUnpacker(ctx, s.content,
		unpack.WithLimiter(semaphore.NewWeighted(int64(s.settings().MaxDownloads))),
		unpack.WithDuplicationSuppressor(route.locks),
		unpack.WithUnpackPlatform(unpack.Platform{
			Platform: route.platform, SnapshotterKey: snapshotterKey, Snapshotter: s.snapshots, Applier: applier{s, route.report},
		}))
	if err != nil {
		return fmt.Errorf("prepare to unpack: %w", err)
	}
	// Labels keep blobs from being collected. A layer's is not needed once it is unpacked.
	labels := images.ChildGCLabelsFilterLayers
	if s.settings().KeepLayers {
		labels = images.ChildGCLabels
	}
	children := images.SetChildrenMappedLabels(s.content, s.children(route.platform), labels)
	handler := images.Handlers(route.get, s.vetter(route), children)
	if err := images.Dispatch(ctx, unpacker.Unpack(handler), nil, target); err != nil {
		cancel()
		_, _ = unpacker.Wait() // it was ended for the error above
		return err
	}
	_, err = unpacker.Wait()
	if err != nil && strings.Contains(err.Error(), "wrong diff id") { // the library has no type for it
		return fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	}
	return err
}

func (s *Store) children(platform platforms.MatchComparer) images.HandlerFunc {
	return images.LimitManifests(images.FilterPlatforms(images.ChildrenHandler(s.content), platform), platform, 1)
}

// manifestOf follows indexes to the manifest of a platform. It labels none: another image
// may have the same index, with a label for another platform.
func (s *Store) manifestOf(ctx context.Context, target ocispec.Descriptor, route route) (ocispec.Descriptor, error) {
	follow := images.Handlers(route.get, s.vetter(route), s.children(route.platform))
	for images.IsIndexType(target.MediaType) {
		found, err := follow(ctx, target)
		if err != nil {
			return target, err
		}
		if len(found) == 0 {
			return target, fmt.Errorf("index %s has no manifest for the platform: %w", target.Digest, errdefs.ErrNotFound)
		}
		target = found[0]
	}
	return target, nil
}

// applier unpacks layers within an allowance each, which containerd's applier lacks.
type applier struct {
	store  *Store
	report func(desc ocispec.Descriptor, stage Stage, done int64)
}

// Apply unpacks a layer and returns the descriptor of its uncompressed bytes.
// What cannot be read as a layer is an ErrDataLoss.
func (a applier) Apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount, _ ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	applied, err := a.apply(ctx, desc, mounts)
	if err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("unpack layer %s: %w", desc.Digest, layerError(err))
	}
	a.report(desc, StageDone, desc.Size)
	return applied, nil
}

func (a applier) apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount) (applied ocispec.Descriptor, err error) {
	blob, err := a.store.content.ReaderAt(ctx, desc)
	if err != nil {
		return applied, err
	}
	defer blob.Close()
	packed := &countedReader{Reader: content.NewReader(blob), report: func(at int64) { a.report(desc, StageUnpack, at) }}
	plain := io.NopCloser(io.Reader(packed))
	if kind, err := images.DiffCompression(ctx, desc.MediaType); err != nil {
		return applied, err
	} else if kind != "" {
		if plain, err = decompress(ctx, packed, a.store.zstd); err != nil {
			return applied, err
		}
	}
	defer plain.Close()
	err = mount.WithTempMount(ctx, mounts, func(root string) error {
		applied, err = a.unpack(ctx, root, plain)
		return err
	})
	return applied, err
}

// unpack writes the files of a plain layer and digests all of its bytes, also those after the archive's end.
func (a applier) unpack(ctx context.Context, root string, plain io.Reader) (ocispec.Descriptor, error) {
	digester := digest.Canonical.Digester()
	whole := &countedReader{Reader: io.TeeReader(plain, digester.Hash())}
	allowed := &allowance{room: a.store.room}
	defer allowed.write(0)
	bounded := archive.WithFilter(func(header *tar.Header) (bool, error) { return true, allowed.take(header) })
	if _, err := archive.Apply(ctx, root, whole, bounded); err != nil {
		return ocispec.Descriptor{}, err
	}
	if _, err := io.Copy(io.Discard, whole); err != nil {
		return ocispec.Descriptor{}, err
	}
	dir, err := os.Open(root) // to sync the layer before its record
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	defer dir.Close()
	if err := unix.Syncfs(int(dir.Fd())); err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("sync the filesystem of %s: %w", root, err)
	}
	return ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Size: whole.at, Digest: digester.Digest()}, nil
}

type countedReader struct {
	io.Reader
	at     int64
	report func(at int64) // may be nil
}

func (r *countedReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.at += int64(n)
	if r.report != nil {
		r.report(r.at)
	}
	return n, err
}

// layerError returns an ErrDataLoss for errors that are not of the system or of the pull's
// end: they are in the layer's bytes.
func layerError(err error) error {
	_, system := errors.AsType[syscall.Errno](err)
	_, path := errors.AsType[*fs.PathError](err)
	if system || path || errdefs.IsResourceExhausted(err) || errdefs.IsInvalidArgument(err) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%w: %v", errdefs.ErrDataLoss, err) //nolint:errorlint // io.ErrUnexpectedEOF would count as the registry's
}

const (
	maxWindow = 128 << 20        // of a zstd frame, which its decoder holds: zstd(1)'s default
	maxZstd   = 2                // decoders at once, on the node
	zstdName  = "minicri-unzstd" // argv[0] of a decoder
)

// decompress returns the plain bytes of a layer or an archive, whose form it tells by the
// first bytes. A zstd decoder takes one of the places.
func decompress(ctx context.Context, packed io.Reader, places *semaphore.Weighted) (io.ReadCloser, error) {
	buffered := bufio.NewReaderSize(packed, 32<<10)
	magic, err := buffered.Peek(10)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch compression.DetectCompression(magic) {
	case compression.Gzip:
		return gzip.NewReader(buffered)
	case compression.Zstd:
		if err := places.Acquire(ctx, 1); err != nil {
			return nil, err
		}
		return startZstd(ctx, buffered, func() { places.Release(1) })
	default:
		return io.NopCloser(buffered), nil
	}
}

// zstdDecoder is a process that decodes one stream. A decoder holds as much as the stream's author likes, up to
// maxWindow: when memory runs out, the kernel ends this process first, not a pod or the daemon.
type zstdDecoder struct {
	io.Reader
	command *exec.Cmd
	end     func() error // waits for the process and returns why it failed
	cancel  context.CancelFunc
}

// startZstd starts the decoder, and calls ended when it has ended or did not start.
func startZstd(ctx context.Context, packed io.Reader, ended func()) (io.ReadCloser, error) {
	running, cancel := context.WithCancel(ctx)
	command, stderr := exec.CommandContext(running, "/proc/self/exe"), &bytes.Buffer{}
	command.Args, command.Env = []string{zstdName}, []string{"GOMAXPROCS=1"}
	command.Stdin, command.Stderr = packed, stderr
	plain, err := command.StdoutPipe()
	if err == nil {
		err = command.Start()
	}
	if err != nil {
		cancel()
		ended()
		return nil, fmt.Errorf("start the zstd decoder: %w", err)
	}
	end := sync.OnceValue(func() error {
		defer ended()
		defer cancel()
		err := command.Wait()
		switch {
		case err == nil:
			return nil
		case ctx.Err() != nil:
			return context.Cause(ctx)
		case command.ProcessState.ExitCode() < 0:
			return fmt.Errorf("the zstd decoder was ended (%w), by the kernel if memory ran out: %w", err, errdefs.ErrResourceExhausted)
		}
		return fmt.Errorf("zstd: %s", cut(strings.TrimSpace(stderr.String()), maxWords))
	})
	return zstdDecoder{Reader: plain, command: command, end: end, cancel: cancel}, nil
}

func (d zstdDecoder) Read(p []byte) (int, error) {
	n, err := d.Reader.Read(p)
	if err != nil && n == 0 {
		err = cmp.Or(d.end(), err)
	}
	return n, err
}

// Close ends the process if it has not ended.
func (d zstdDecoder) Close() error {
	d.cancel()
	_ = d.end() // its error was read, or nobody reads on
	return nil
}

// IsZstdDecoder reports whether this process was started for DecodeZstd alone.
func IsZstdDecoder() bool { return os.Args[0] == zstdName }

// DecodeZstd decodes stdin to stdout and returns the exit code of the process.
func DecodeZstd() int {
	err := os.WriteFile("/proc/self/oom_score_adj", []byte("1000"), 0)
	if err == nil {
		err = decodeZstd(os.Stdin, os.Stdout)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
		return 1
	}
	return 0
}

func decodeZstd(packed io.Reader, plain io.Writer) error {
	// With one goroutine a decoder takes the window and 1 MiB. The limit of the memory is
	// for a frame of a single segment, which has no window.
	decoder, err := zstd.NewReader(packed, zstd.WithDecoderLowmem(true), zstd.WithDecoderConcurrency(1),
		zstd.WithDecoderMaxWindow(maxWindow), zstd.WithDecoderMaxMemory(maxWindow))
	if err != nil {
		return err
	}
	defer decoder.Close()
	_, err = io.Copy(plain, decoder)
	if errors.Is(err, zstd.ErrWindowSizeExceeded) || errors.Is(err, zstd.ErrDecoderSizeExceeded) {
		return fmt.Errorf("the window of a frame is larger than %d MiB: %w", maxWindow>>20, err)
	}
	return err
}
