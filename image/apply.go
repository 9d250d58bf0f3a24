package image

import (
	"archive/tar"
	"context"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/pkg/archive"
	continuity "github.com/containerd/continuity/fs"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"
)

// applier unpacks layers, each within the bounds of an allowance. Where it can, it
// unpacks straight into the directory of a layer's snapshot and notes which
// directories it made without the layer listing them. containerd's own applier does
// not say so, and would bind mount a bottom layer below /tmp first, which a kill would
// leave behind.
type applier struct {
	content content.Provider
	syncs   bool
	zstd    *semaphore.Weighted // places for decoders
	room    *room
	// note receives the implied directories of a layer, by its directory. Nil: layers
	// are unpacked through a mount, as they have to be in a user namespace.
	note func(upper string, implied []string)
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
	plain, err := a.plain(ctx, desc, &progressReader{Reader: content.NewReader(blob), report: config.Progress})
	if err != nil {
		return applied, err
	}
	defer plain.Close()
	if a.note == nil {
		err = mount.WithTempMount(ctx, mounts, func(root string) error {
			applied, err = a.unpack(ctx, root, plain)
			return err
		})
		return applied, err
	}
	upper, err := upperOf(mounts)
	if err != nil {
		return applied, err
	}
	return a.unpack(ctx, upper, plain)
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
	digester, counted := digest.Canonical.Digester(), &countingWriter{}
	whole := io.TeeReader(plain, io.MultiWriter(digester.Hash(), counted))
	listed := listing{root: root, directories: map[string]bool{}}
	allowed := a.room.allow()
	defer allowed.end()
	options := []archive.ApplyOpt{archive.WithFilter(func(header *tar.Header) (bool, error) {
		if err := allowed.take(header); err != nil {
			return false, err
		}
		return listed.see(header)
	})}
	if a.note != nil {
		options = append(options, archive.WithConvertWhiteout(archive.OverlayConvertWhiteout))
	}
	if _, err := archive.Apply(ctx, root, whole, options...); err != nil {
		return ocispec.Descriptor{}, err
	}
	if _, err := io.Copy(io.Discard, whole); err != nil {
		return ocispec.Descriptor{}, err
	}
	if a.note != nil {
		a.note(root, listed.implied())
	}
	if a.syncs {
		if err := syncFilesystem(root); err != nil {
			return ocispec.Descriptor{}, err
		}
	}
	return ocispec.Descriptor{MediaType: ocispec.MediaTypeImageLayer, Size: counted.n, Digest: digester.Digest()}, nil
}

// upperOf finds the directory that a layer is unpacked into: the source of the
// bind mount of a snapshot without parents, or the upper directory of an overlay.
func upperOf(mounts []mount.Mount) (string, error) {
	if len(mounts) == 1 && mounts[0].Type == "bind" {
		return mounts[0].Source, nil
	}
	for _, m := range mounts {
		for _, option := range m.Options {
			if upper, ok := strings.CutPrefix(option, "upperdir="); ok {
				return upper, nil
			}
		}
	}
	return "", fmt.Errorf("the snapshot has no directory to unpack into: %v", mounts)
}

// listing watches the entries of a layer go by, each just before it is written.
type listing struct {
	root        string
	directories map[string]bool // that exist, by path; true if the layer listed them
}

// see is an archive.Filter that takes every entry. It resolves the entry's
// directory as archive.Apply is about to.
func (l *listing) see(header *tar.Header) (bool, error) {
	dir, base := filepath.Split(header.Name)
	dir, err := continuity.RootPath(l.root, dir)
	if err != nil {
		return false, err
	}
	for parent := dir; len(parent) > len(l.root); parent = filepath.Dir(parent) {
		if _, known := l.directories[parent]; known {
			break
		}
		l.directories[parent] = false
	}
	path := filepath.Join(dir, filepath.Join("/", base))
	if header.Typeflag == tar.TypeDir {
		l.directories[path] = true
	} else if _, known := l.directories[path]; known {
		l.replaced(path)
	}
	return true, nil
}

// replaced forgets a directory in whose place the layer has something else.
func (l *listing) replaced(path string) {
	for dir := range l.directories {
		if dir == path || strings.HasPrefix(dir, path+"/") {
			delete(l.directories, dir)
		}
	}
}

// implied returns the directories that the layer did not list, parents first.
func (l *listing) implied() (paths []string) {
	for dir, listed := range l.directories {
		if !listed {
			paths = append(paths, strings.TrimPrefix(dir, l.root))
		}
	}
	slices.Sort(paths)
	return paths
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

// progressReader reports how many compressed bytes have been unpacked.
type progressReader struct {
	io.Reader
	done   int64
	report func(int64)
}

func (r *progressReader) Read(p []byte) (int, error) {
	n, err := r.Reader.Read(p)
	r.done += int64(n)
	if r.report != nil {
		r.report(r.done)
	}
	return n, err
}

type countingWriter struct{ n int64 }

func (w *countingWriter) Write(p []byte) (int, error) {
	w.n += int64(len(p))
	return len(p), nil
}
