package image

import (
	"context"
	"crypto/rand"
	"fmt"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// PullResult is how a pull ended.
type PullResult struct {
	Reference string
	Size      int64 // of the image, 0 if there is none
	Took      time.Duration
	Bytes     int64 // that came from the registry
	Err       error
}

// Stage says what is being done with a blob.
type Stage string

const (
	StageDownload Stage = "downloading" // Done of Total bytes have come from the registry
	StageUnpack   Stage = "unpacking"   // Done of Total compressed bytes have been unpacked
	StageDone     Stage = "done"        // the blob is on the node; Done equals Total
)

// Progress is how far a pull has got with one blob. Reports of one blob are in order.
type Progress struct {
	Digest string // sha256:<hex>
	Stage  Stage
	Done   int64 // bytes
	Total  int64 // bytes
}

// Pull makes the image that reference names today complete and durable on this
// node and returns it. Pulls at the same time fetch each blob and unpack each layer
// once. progress may be nil; it is called from several goroutines, one at a time, and
// not after Pull has returned.
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
	p := &pulling{store: s, ref: ref, auth: auth, locks: s.locks.forPull(s.config.waitWindow), progress: progress, last: map[string]reported{}}
	if p.platform, err = platformNamed(platform); err != nil {
		return Image{}, err
	}
	if err := s.begin(); err != nil {
		return Image{}, fmt.Errorf("pull %s: %w", ref, err)
	}
	defer s.work.Done()
	ctx, cancel := context.WithCancelCause(s.scope(ctx))
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(context.Cause(s.ctx)) })()
	began := time.Now()
	image, err := p.run(ctx, platform)
	if err != nil {
		err = pullError{fmt.Errorf("pull %s: %w", ref, registryError(ctx, err))}
	}
	p.mu.Lock()
	p.progress = nil // the library may have left a fetch behind, which is about to end
	p.mu.Unlock()
	s.config.Observe(PullResult{Reference: ref.String(), Size: image.Size, Took: time.Since(began), Bytes: p.fetched.Load(), Err: err})
	return image, err
}

// pulling is one pull.
type pulling struct {
	store    *Store
	ref      reference.Named
	auth     Auth
	platform platforms.MatchComparer
	remote   remotes.Fetcher
	locks    *pullLocks
	// id sets the downloads of this pull apart from those of others that did not wait for it.
	id      string
	fetched atomic.Int64 // bytes

	mu       sync.Mutex // guards what follows; held during progress, so reports stay in order
	progress func(Progress)
	last     map[string]reported // by digest
}

// reported is the last report of a blob.
type reported struct {
	stage Stage
	time  time.Time
}

// reportEvery bounds how often one stage of one blob is reported.
const reportEvery = 100 * time.Millisecond

func (p *pulling) report(desc ocispec.Descriptor, stage Stage, done int64) {
	p.mu.Lock()
	defer p.mu.Unlock()
	digest, now := desc.Digest.String(), time.Now()
	last := p.last[digest]
	again := last.stage == stage && (stage == StageDone || done < desc.Size && now.Sub(last.time) < reportEvery)
	if p.progress == nil || again {
		return
	}
	p.last[digest] = reported{stage: stage, time: now}
	p.progress(Progress{Digest: digest, Stage: stage, Done: done, Total: desc.Size})
}

// run does the work, in order. platform is "" for the node's.
func (p *pulling) run(ctx context.Context, platform string) (Image, error) {
	s := p.store
	if pinned, ok := p.ref.(reference.Digested); ok {
		if err := checkAlgorithm(pinned.Digest()); err != nil {
			return Image{}, err
		}
	}
	ctx, release, err := s.lease(ctx)
	if err != nil {
		return Image{}, err
	}
	defer release()
	resolver, err := s.resolver(ctx, p.ref, p.auth)
	if err != nil {
		return Image{}, err
	}
	target, err := resolve(ctx, resolver, p.ref)
	if err != nil {
		return Image{}, err
	}
	if err := s.verify(ctx, p.ref, target); err != nil {
		return Image{}, err
	}
	if p.remote, err = resolver.Fetcher(ctx, p.ref.String()); err != nil {
		return Image{}, err
	}
	p.id = rand.Text()
	way := route{platform: p.platform, wanted: platform, get: p.get, locks: p.locks, report: p.report}
	if platform != "" {
		if target, err = s.manifestOf(ctx, target, way); err != nil {
			return Image{}, err
		}
	}
	if err := s.unpackTree(ctx, target, way); err != nil {
		return Image{}, err
	}
	image, err := s.fromContent(ctx, target)
	if err != nil {
		return Image{}, err
	}
	image.names = []string{p.ref.String(), p.ref.Name() + "@" + target.Digest.String()}
	if err := s.record(ctx, image); err != nil {
		return Image{}, err
	}
	return s.Get(image.ID)
}

func resolve(ctx context.Context, resolver remotes.Resolver, ref reference.Named) (ocispec.Descriptor, error) {
	_, target, err := resolver.Resolve(ctx, ref.String())
	if err != nil {
		return target, fmt.Errorf("resolve: %w", err)
	}
	if !images.IsIndexType(target.MediaType) && !images.IsManifestType(target.MediaType) {
		return target, fmt.Errorf("resolve: %s is of type %q, not an image: %w", target.Digest, cut(target.MediaType, 100), errdefs.ErrInvalidArgument)
	}
	return target, nil
}
