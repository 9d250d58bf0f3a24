package image

import (
	"context"
	"fmt"
	"math"
	"slices"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	"github.com/opencontainers/image-spec/identity"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// checkRoom refuses an image whose layers do not fit together, before the first
// is asked for. What they take unpacked is not known until they are there, so
// this is the least that is needed. The fetcher looks again at each blob: other
// pulls use the same disk.
func (s *Store) checkRoom(ctx context.Context, layers []ocispec.Descriptor, diffIDs []digest.Digest) error {
	missing, err := s.missing(ctx, layers, diffIDs)
	if err != nil {
		return err
	}
	var needed int64
	for _, size := range missing {
		needed += min(size, math.MaxInt64-needed)
	}
	free, err := s.freeBytes()
	if err != nil {
		return err
	}
	if needed > free {
		return fmt.Errorf("%d bytes are needed for its layers, %d are free on the filesystem of the images: %w", needed, free, errdefs.ErrResourceExhausted)
	}
	return nil
}

// missing returns the sizes of the blobs that have to be fetched: those of layers
// above the topmost unpacked one that are not there.
func (s *Store) missing(ctx context.Context, layers []ocispec.Descriptor, diffIDs []digest.Digest) (map[digest.Digest]int64, error) {
	chain, missing := identity.ChainIDs(slices.Clone(diffIDs)), map[digest.Digest]int64{}
	for i, layer := range slices.Backward(layers) {
		_, err := s.snapshots.Stat(ctx, chain[i].String())
		if err == nil {
			break
		}
		if errdefs.IsNotFound(err) {
			_, err = s.engine.content.Info(ctx, layer.Digest)
		}
		if errdefs.IsNotFound(err) {
			missing[layer.Digest] = layer.Size
		} else if err != nil {
			return nil, fmt.Errorf("look for layer %s: %w", layer.Digest, err)
		}
	}
	return missing, nil
}

// freeBytes is what may still be written where blobs are kept, without the blocks
// that the filesystem reserves for root (statvfs(3), f_bavail).
func (s *Store) freeBytes() (int64, error) {
	var disk unix.Statfs_t
	if err := unix.Statfs(s.dir, &disk); err != nil {
		return 0, fmt.Errorf("free space of %s: %w", s.dir, err)
	}
	return int64(disk.Bavail) * disk.Bsize, nil
}
