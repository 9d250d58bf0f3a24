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
	"path/filepath"
	"strings"
	"sync"
	"sync/atomic"
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

// unpackTree walks from target to the manifest of one platform, unpacks its layers and returns it. After an error
// fetches may go on after it returns; their context has ended.
func (s *Store) unpackTree(ctx context.Context, target ocispec.Descriptor, route route) (manifest ocispec.Manifest, err error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	unpacker, err := unpack.NewUnpacker(ctx, s.content,
		unpack.WithLimiter(semaphore.NewWeighted(int64(s.settings().MaxDownloads))),
		unpack.WithDuplicationSuppressor(route.locks),
		unpack.WithUnpackPlatform(unpack.Platform{
			Platform:       platforms.All, // the vetter has looked at it
			SnapshotterKey: snapshotterKey, Snapshotter: s.snapshots, Applier: applier{s, route.locks, route.report},
		}))
	if err != nil {
		return manifest, fmt.Errorf("prepare to unpack: %w", err)
	}
	// Labels keep blobs from being collected. A layer's is not needed once it is unpacked.
	labels := images.ChildGCLabelsFilterLayers
	if s.settings().KeepLayers {
		labels = images.ChildGCLabels
	}
	children, vetter := images.SetChildrenMappedLabels(s.content, s.children(route.platform), labels), s.vetter(route)
	handler := images.Handlers(route.get, images.HandlerFunc(vetter.vet), children)
	if err := images.Dispatch(ctx, unpacker.Unpack(handler), nil, target); err != nil {
		cancel()
		_, _ = unpacker.Wait() // it was ended for the error above
		return manifest, err
	}
	_, err = unpacker.Wait()
	if err != nil && strings.Contains(err.Error(), "wrong diff id") { // the library has no type for it
		return manifest, fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	}
	return *cmp.Or(vetter.manifest.Load(), &manifest), err
}

// children lists the manifest for a platform, or a configuration and layers. A configuration that Docker takes for one
// gets the type by which the library knows it.
func (s *Store) children(platform platforms.MatchComparer) images.HandlerFunc {
	list := images.HandlerFunc(func(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		found, err := images.Children(ctx, s.content, desc)
		for i := range found {
			if i == 0 && isDockerConfig(desc.MediaType, found[i].MediaType) {
				found[i].MediaType = images.MediaTypeDockerSchema2Config
			}
		}
		return found, err
	})
	return images.LimitManifests(images.FilterPlatforms(list, platform), platform, 1)
}

// manifestOf follows indexes to the manifest of a platform. It labels none: another image
// may have the same index, with a label for another platform.
func (s *Store) manifestOf(ctx context.Context, target ocispec.Descriptor, route route) (ocispec.Descriptor, error) {
	follow := images.Handlers(route.get, images.HandlerFunc(s.vetter(route).vet), s.children(route.platform))
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
	locks  *pullLocks // of the pull, which counts an unpack that makes no progress as a slow one
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
	packed := &countedReader{ctx: ctx, Reader: content.NewReader(blob), report: func(at int64) { a.report(desc, StageUnpack, at) }}
	place := &place{places: a.store.zstd}
	watched, stop := context.WithCancel(ctx)
	defer stop()
	go a.locks.watch(watched, &packed.recent, place.pass)
	plain, err := decompress(ctx, packed, place) // by the bytes: a type is often wrong
	if err != nil {
		return applied, err
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
	allowed, err := a.store.room.allow()
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	whole := &countedReader{ctx: ctx, Reader: io.TeeReader(plain, digester.Hash()), check: allowed.read}
	defer allowed.write(0)
	hidden := whiteouts{root: root, own: map[string]struct{}{}, cleared: map[string]struct{}{}}
	_, err = archive.Apply(ctx, root, whole, archive.WithConvertWhiteout(hidden.convert),
		archive.WithFilter(func(header *tar.Header) (bool, error) { return true, allowed.take(header) }))
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	allowed.end = whole.at
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

// countedReader fails when its context has ended: what reads it may loop for long.
type countedReader struct {
	ctx context.Context
	io.Reader
	at     int64
	recent atomic.Int64         // bytes, for a watch
	report func(at int64)       // may be nil
	check  func(at int64) error // may be nil
}

func (r *countedReader) Read(p []byte) (int, error) {
	if r.ctx.Err() != nil {
		return 0, context.Cause(r.ctx)
	}
	n, err := r.Reader.Read(p)
	r.at += int64(n)
	r.recent.Add(int64(n))
	if r.report != nil {
		r.report(r.at)
	}
	if r.check != nil && err == nil {
		err = r.check(r.at)
	}
	return n, err
}

const whiteout, opaque = ".wh.", ".wh..wh..opq" // image-spec, layer.md

// whiteouts removes from a layer's mount what the layer hides. A whiteout hides files of lower layers alone: what the
// layer has itself stays, in whatever order its archive is.
type whiteouts struct {
	root    string
	own     map[string]struct{} // the paths that the layer has written, with all that they are in
	cleared map[string]struct{} // directories that have nothing of lower layers any more
}

// convert is asked for each entry, with its path below the root and all links resolved, and returns whether to write it.
func (w whiteouts) convert(_ *tar.Header, path string) (bool, error) {
	dir, base := filepath.Split(path)
	dir = filepath.Clean(dir)
	hidden, isWhiteout := strings.CutPrefix(base, whiteout)
	switch {
	case base == opaque:
		return false, w.clear(dir)
	case isWhiteout:
		return false, w.remove(filepath.Join(dir, hidden))
	}
	for ; len(path) > len(w.root); path = filepath.Dir(path) {
		if _, known := w.own[path]; known {
			break
		}
		w.own[path] = struct{}{}
	}
	return true, nil
}

// remove removes a path, of a directory that the layer has what is not the layer's.
func (w whiteouts) remove(path string) error {
	if _, own := w.own[path]; !own {
		return os.RemoveAll(path)
	}
	if info, err := os.Lstat(path); err != nil || !info.IsDir() {
		return err
	}
	return w.clear(path)
}

func (w whiteouts) clear(dir string) error {
	if _, done := w.cleared[dir]; done {
		return nil
	}
	w.cleared[dir] = struct{}{}
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, entry := range entries {
		if err := w.remove(filepath.Join(dir, entry.Name())); err != nil {
			return err
		}
	}
	return nil
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
	slowZstd  = 6                // more that are slow
	zstdName  = "minicri-unzstd" // argv[0] of a decoder
)

// places are those of zstd decoders, of all pulls and imports together.
type places struct{ quick, all *semaphore.Weighted }

func newPlaces() places {
	return places{quick: semaphore.NewWeighted(maxZstd), all: semaphore.NewWeighted(maxZstd + slowZstd)}
}

// place is one of them. A decoder that is slow passes its place on: a few bytes may stand for hours of its work.
type place struct {
	places
	mu   sync.Mutex // guards held
	held bool       // whether it is one of the quick
}

func (p *place) take(ctx context.Context) error {
	if err := p.all.Acquire(ctx, 1); err != nil {
		return err
	}
	if err := p.quick.Acquire(ctx, 1); err != nil {
		p.all.Release(1)
		return err
	}
	p.mu.Lock()
	defer p.mu.Unlock()
	p.held = true
	return nil
}

func (p *place) pass() {
	p.mu.Lock()
	defer p.mu.Unlock()
	if p.held {
		p.quick.Release(1)
	}
	p.held = false
}

func (p *place) end() {
	p.pass()
	p.all.Release(1)
}

// decompress returns the plain bytes of a layer or an archive, whose form it tells by the
// first bytes. A zstd decoder takes a place.
func decompress(ctx context.Context, packed io.Reader, place *place) (io.ReadCloser, error) {
	buffered := bufio.NewReaderSize(packed, 32<<10)
	magic, err := buffered.Peek(10)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, err
	}
	switch compression.DetectCompression(magic) {
	case compression.Gzip:
		return newGzip(buffered)
	case compression.Zstd:
		if err := place.take(ctx); err != nil {
			return nil, err
		}
		return startZstd(ctx, buffered, place.end)
	default:
		return io.NopCloser(buffered), nil
	}
}

// gzipReader reads the members of a gzip stream. It ignores zeros behind the last one, as gzip(1) does.
type gzipReader struct {
	*gzip.Reader
	packed *bufio.Reader
}

func newGzip(packed *bufio.Reader) (io.ReadCloser, error) {
	r, err := gzip.NewReader(packed)
	if err != nil {
		return nil, err
	}
	r.Multistream(false)
	return &gzipReader{r, packed}, nil
}

func (r *gzipReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	switch {
	case !errors.Is(err, io.EOF):
		return n, err
	case n > 0:
		return n, nil
	}
	first, err := r.packed.Peek(1)
	for err == nil && first[0] == 0 {
		if _, err = r.packed.Discard(1); err == nil {
			first, err = r.packed.Peek(1)
		}
		if err == nil && first[0] != 0 {
			return 0, gzip.ErrHeader
		}
	}
	if err != nil {
		return 0, err
	}
	if err := r.Reset(r.packed); err != nil {
		return 0, err
	}
	r.Multistream(false)
	return 0, nil
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
