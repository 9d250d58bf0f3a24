package image

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
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
	return s.PullFor(ctx, reference, "", auth, progress)
}

// PullFor is Pull for a platform other than the node's, written as os/arch or
// os/arch/variant. Of an index, the manifest of that platform alone is recorded.
func (s *Store) PullFor(ctx context.Context, reference, platform string, auth Auth, progress func(Progress)) (Image, error) {
	ref, err := ParseReference(reference)
	if err != nil {
		return Image{}, err
	}
	wanted, err := platformNamed(platform)
	if err != nil {
		return Image{}, err
	}
	work := &pulling{store: s, ref: ref, auth: auth, platform: wanted, narrow: platform != ""}
	key := pullKey{name: ref.String(), auth: auth, platform: platform}
	return s.pulls.join(ctx, key, progress, func(ctx context.Context, report func(Progress)) (Image, error) {
		work.report = report
		began := time.Now()
		image, err := work.run(s.scope(ctx))
		if err != nil {
			err = pullError{fmt.Errorf("pull %s: %w", ref, registryError(ctx, err))}
		}
		s.config.Observe(PullResult{Reference: ref.String(), Size: image.Size, Took: time.Since(began), Bytes: work.fetched.Load(), Err: err})
		return image, err
	})
}

// pulling is one pull.
type pulling struct {
	store    *Store
	ref      Reference
	auth     Auth
	platform platforms.MatchComparer
	narrow   bool // record the platform's manifest, not the index
	report   func(Progress)

	fetched atomic.Int64 // bytes
}

// run does the work, in order.
func (p *pulling) run(ctx context.Context) (Image, error) {
	s := p.store
	if p.ref.Digest != "" {
		if err := checkAlgorithm(p.ref.Digest); err != nil {
			return Image{}, err
		}
	}
	ctx, release, err := s.lease(ctx)
	if err != nil {
		return Image{}, err
	}
	defer release()
	resolver, disconnect, err := s.resolver(ctx, p.ref, p.auth)
	if err != nil {
		return Image{}, err
	}
	defer disconnect()
	target, err := resolve(ctx, resolver, p.ref)
	if err != nil {
		return Image{}, err
	}
	if err := s.verify(ctx, p.ref, target); err != nil {
		return Image{}, err
	}
	if err := p.fetchAndUnpack(ctx, resolver, target); err != nil {
		return Image{}, err
	}
	if p.narrow {
		if target, err = s.manifestOf(ctx, target, p.platform); err != nil {
			return Image{}, err
		}
	}
	if err := p.reportDone(ctx, target); err != nil {
		return Image{}, err
	}
	body, err := s.readBody(ctx, target)
	if err != nil {
		return Image{}, err
	}
	names := []string{p.ref.String(), p.ref.pinnedTo(target.Digest).String()}
	if err := s.record(ctx, recorded{target: target, body: body, names: names}); err != nil {
		return Image{}, err
	}
	return s.Get(body.id)
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

func (p *pulling) fetchAndUnpack(ctx context.Context, resolver remotes.Resolver, target ocispec.Descriptor) error {
	remote, err := resolver.Fetcher(ctx, p.ref.String())
	if err != nil {
		return err
	}
	meter := newMeter(p.store.config.waitWindow)
	f := fetcher{
		content: p.store.engine.content, remote: remote, report: p.report, pull: rand.Text(),
		meter: meter, fetched: &p.fetched, checkFree: p.store.checkFree,
	}
	way := route{platform: p.platform, narrow: p.narrow, get: f.handle, locks: p.store.locks.forPull(meter), report: p.report}
	return p.store.unpackTree(ctx, target, way)
}

// manifestOf follows an index to the manifest of a platform.
func (s *Store) manifestOf(ctx context.Context, target ocispec.Descriptor, platform platforms.MatchComparer) (ocispec.Descriptor, error) {
	for images.IsIndexType(target.MediaType) {
		children, err := s.children(platform, true)(ctx, target)
		if err != nil {
			return target, err
		}
		if len(children) == 0 {
			return target, fmt.Errorf("index %s has no manifest for the platform: %w", target.Digest, errdefs.ErrNotFound)
		}
		target = children[0]
	}
	return target, nil
}

// reportDone names the layers that were there before, too.
func (p *pulling) reportDone(ctx context.Context, target ocispec.Descriptor) error {
	manifest, err := images.Manifest(ctx, p.store.engine.content, target, p.platform)
	if err != nil {
		return fmt.Errorf("read manifest of %s: %w", target.Digest, err)
	}
	for _, blob := range append(manifest.Layers, manifest.Config) {
		p.report(Progress{Digest: blob.Digest.String(), Stage: StageDone, Done: blob.Size, Total: blob.Size})
	}
	return nil
}
