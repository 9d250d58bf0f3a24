package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"strings"
	"syscall"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/unpack"
	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"
)

// route says how an image is walked from its manifest or index to its layers.
type route struct {
	// platform orders the manifests of an index; one is taken. wanted is its name, "" for
	// the node's.
	platform platforms.MatchComparer
	wanted   string
	// get makes a blob present before it is read.
	get    images.HandlerFunc
	locks  *pullLocks
	report func(desc ocispec.Descriptor, stage Stage, done int64)
}

// unpackTree walks from target to the configuration of one platform and unpacks
// its layers. It returns when every layer is a committed snapshot, or, after an
// error, when all work has ended but fetches, whose context has.
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
	// Labels keep manifests and configurations from being collected. Layers get one only
	// if they are to be kept: once unpacked, the blob is not needed.
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

// children lists what a blob points at, for one platform only.
func (s *Store) children(platform platforms.MatchComparer) images.HandlerFunc {
	return images.LimitManifests(images.FilterPlatforms(images.ChildrenHandler(s.content), platform), platform, 1)
}

// manifestOf follows indexes to the manifest of a platform. They get no labels:
// another image may have the same index, with a label for another platform.
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

// applier unpacks layers onto those below, each within the bounds of an allowance,
// which containerd's own applier does not have.
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

// unpack writes the files of a plain layer and digests all of its bytes, those
// after the archive's end too.
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
	// The layer has to be on the disk, before its record is.
	dir, err := os.Open(root)
	if err != nil {
		return ocispec.Descriptor{}, err
	}
	defer dir.Close()
	if err := unix.Syncfs(int(dir.Fd())); err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("sync the filesystem of %s: %w", root, err)
	}
	return ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Size: whole.at, Digest: digester.Digest()}, nil
}

// countedReader counts what is read, and reports it.
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

// layerError sorts out whose fault an error is: one of a system call, or of the
// pull's end, keeps its kind, anything else is in the bytes of the layer.
func layerError(err error) error {
	_, system := errors.AsType[syscall.Errno](err)
	_, path := errors.AsType[*fs.PathError](err)
	if system || path || errdefs.IsResourceExhausted(err) || errdefs.IsInvalidArgument(err) || errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return err
	}
	return fmt.Errorf("%w: %v", errdefs.ErrDataLoss, err) //nolint:errorlint // io.ErrUnexpectedEOF would count as the registry's
}
