package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"syscall"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/archive"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"
)

// applier unpacks layers onto those below, each within the bounds of an allowance,
// which containerd's own applier does not have.
type applier struct {
	content content.Provider
	zstd    *semaphore.Weighted // places for decoders
	room    *room
}

// Apply unpacks a layer and returns the descriptor of its uncompressed bytes.
// What cannot be read as a layer is an ErrDataLoss.
func (a applier) Apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount, opts ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	applied, err := a.apply(ctx, desc, mounts, opts)
	if err != nil {
		return ocispec.Descriptor{}, fmt.Errorf("unpack layer %s: %w", desc.Digest, layerError(err))
	}
	return applied, nil
}

func (a applier) apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount, opts []diff.ApplyOpt) (applied ocispec.Descriptor, err error) {
	var config diff.ApplyConfig
	for _, opt := range opts {
		if err := opt(ctx, desc, &config); err != nil {
			return applied, err
		}
	}
	blob, err := a.content.ReaderAt(ctx, desc)
	if err != nil {
		return applied, err
	}
	defer blob.Close()
	plain, err := a.plain(ctx, desc, &countedReader{Reader: content.NewReader(blob), report: func(at int64, _ int) {
		if config.Progress != nil {
			config.Progress(at)
		}
	}})
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

func (a applier) plain(ctx context.Context, desc ocispec.Descriptor, packed io.Reader) (io.ReadCloser, error) {
	if kind, err := images.DiffCompression(ctx, desc.MediaType); err != nil || kind == "" {
		return io.NopCloser(packed), err
	}
	return decompress(ctx, packed, a.zstd)
}

// unpack writes the files of a plain layer and digests all of its bytes, those
// after the archive's end too.
func (a applier) unpack(ctx context.Context, root string, plain io.Reader) (ocispec.Descriptor, error) {
	digester := digest.Canonical.Digester()
	whole := &countedReader{Reader: io.TeeReader(plain, digester.Hash()), report: func(int64, int) {}}
	allowed := a.room.allow()
	defer allowed.end()
	bounded := archive.WithFilter(func(header *tar.Header) (bool, error) { return true, allowed.take(header) })
	if _, err := archive.Apply(ctx, root, whole, bounded); err != nil {
		return ocispec.Descriptor{}, err
	}
	if _, err := io.Copy(io.Discard, whole); err != nil {
		return ocispec.Descriptor{}, err
	}
	if err := syncFilesystem(root); err != nil {
		return ocispec.Descriptor{}, err
	}
	return ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Size: whole.at, Digest: digester.Digest()}, nil
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

// syncFilesystem puts a layer on the disk, with whatever else its filesystem
// has not written yet.
func syncFilesystem(path string) error {
	dir, err := os.Open(path)
	if err != nil {
		return err
	}
	defer dir.Close()
	if err := unix.Syncfs(int(dir.Fd())); err != nil {
		return fmt.Errorf("sync the filesystem of %s: %w", path, err)
	}
	return nil
}
