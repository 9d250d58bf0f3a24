package image

import (
	"context"
	"crypto/rand"
	"fmt"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sys/unix"
)

// Pull makes the image that reference names today complete and durable on this
// node and returns it. Equal pulls at the same time share the work; the end of
// ctx ends this caller's waiting, and the work when no one else waits. progress
// may be nil; it is called from several goroutines, one at a time.
//
// Errors: ErrInvalidArgument for the reference or credentials, ErrNotFound,
// ErrUnauthenticated, ErrPermissionDenied and ErrResourceExhausted for what the
// registry answered, ErrRegistryUnavailable when it did not, ErrDataLoss for
// wrong bytes, ErrVerification for a verifier's no.
func (s *Store) Pull(ctx context.Context, reference string, auth Auth, progress func(Progress)) (Image, error) {
	ref, err := ParseReference(reference)
	if err != nil {
		return Image{}, err
	}
	key := pullKey{name: ref.String(), auth: auth}
	return s.pulls.join(ctx, key, progress, func(ctx context.Context, report func(Progress)) (Image, error) {
		image, err := s.pull(s.scope(ctx), ref, auth, report)
		if err != nil {
			return Image{}, pullError{fmt.Errorf("pull %s: %w", ref, registryError(ctx, err))}
		}
		return image, nil
	})
}

// pull is the work, in order.
func (s *Store) pull(ctx context.Context, ref Reference, auth Auth, report func(Progress)) (Image, error) {
	if ref.Digest != "" {
		if err := checkAlgorithm(ref.Digest); err != nil {
			return Image{}, err
		}
	}
	ctx, release, err := s.lease(ctx)
	if err != nil {
		return Image{}, err
	}
	defer release()
	resolver, disconnect, err := s.resolver(ctx, ref, auth)
	if err != nil {
		return Image{}, err
	}
	defer disconnect()
	target, err := resolve(ctx, resolver, ref)
	if err != nil {
		return Image{}, err
	}
	if err := s.verify(ctx, ref, target); err != nil {
		return Image{}, err
	}
	if err := s.fetchAndUnpack(ctx, resolver, ref, target, report); err != nil {
		return Image{}, err
	}
	return s.record(ctx, target, ref.String(), ref.pinnedTo(target.Digest).String())
}

func resolve(ctx context.Context, resolver remotes.Resolver, ref Reference) (ocispec.Descriptor, error) {
	_, target, err := resolver.Resolve(ctx, ref.String())
	if err != nil {
		return target, fmt.Errorf("resolve: %w", err)
	}
	if !images.IsIndexType(target.MediaType) && !images.IsManifestType(target.MediaType) {
		return target, fmt.Errorf("resolve: %s is of type %q, not an image: %w", target.Digest, cut(target.MediaType, 100), errdefs.ErrInvalidArgument)
	}
	return target, nil
}

func (s *Store) fetchAndUnpack(ctx context.Context, resolver remotes.Resolver, ref Reference, target ocispec.Descriptor, report func(Progress)) error {
	remote, err := resolver.Fetcher(ctx, ref.String())
	if err != nil {
		return err
	}
	meter := newMeter(s.config.waitWindow)
	f := fetcher{content: s.engine.content, remote: remote, report: report, pull: rand.Text(), meter: meter, free: s.freeBytes}
	tree := tree{platform: nodePlatform(), get: f.handle, locks: s.locks.forPull(meter), report: report}
	if err := s.unpackTree(ctx, target, tree); err != nil {
		return err
	}
	return s.reportDone(ctx, target, report)
}

// freeBytes is what root may still write where blobs are kept.
func (s *Store) freeBytes() (int64, error) {
	var disk unix.Statfs_t
	if err := unix.Statfs(s.dir, &disk); err != nil {
		return 0, fmt.Errorf("free space of %s: %w", s.dir, err)
	}
	return int64(disk.Bavail) * disk.Bsize, nil
}

// reportDone names the layers that were there before, too.
func (s *Store) reportDone(ctx context.Context, target ocispec.Descriptor, report func(Progress)) error {
	manifest, err := images.Manifest(ctx, s.engine.content, target, nodePlatform())
	if err != nil {
		return fmt.Errorf("read manifest of %s: %w", target.Digest, err)
	}
	for _, blob := range append(manifest.Layers, manifest.Config) {
		report(Progress{Digest: blob.Digest.String(), Stage: StageDone, Done: blob.Size, Total: blob.Size})
	}
	return nil
}
