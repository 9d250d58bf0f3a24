package image

import (
	"context"
	"fmt"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/unpack"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"
)

// route says how an image is walked from its manifest or index to its layers.
type route struct {
	// platform orders the manifests of an index; one is taken.
	platform platforms.MatchComparer
	// narrow: the index that was followed is not kept.
	narrow bool
	// get makes a blob present before it is read.
	get    images.HandlerFunc
	locks  *pullLocks
	report func(Progress)
}

// wanted names the platform in errors.
func (r route) wanted() string {
	if r.narrow {
		return "the platform that was asked for"
	}
	return "this node"
}

// unpackTree walks from target to the configuration of one platform and unpacks
// its layers. It returns when every layer is a committed snapshot, or, after an
// error, when all work has ended.
func (s *Store) unpackTree(ctx context.Context, target ocispec.Descriptor, route route) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	unpacker, err := s.newUnpacker(ctx, route)
	if err != nil {
		return fmt.Errorf("prepare to unpack: %w", err)
	}
	gate := &gate{get: route.get}
	vetter := &vetter{content: s.engine.content, platform: route.platform, wanted: route.wanted(), room: s.checkRoom}
	handler := images.Handlers(images.HandlerFunc(gate.enter), images.HandlerFunc(vetter.vet), s.children(route.platform, route.narrow))
	err = images.Dispatch(ctx, unpacker.Unpack(handler), nil, target)
	if err != nil {
		cancel()
	}
	_, unpackErr := unpacker.Wait()
	cancel()
	gate.close()
	if err != nil {
		return err
	}
	return wrongLayer(unpackErr)
}

// wrongLayer gives the unpacker's error for bytes that are not those of the
// image's configuration its kind; the library has no type for it.
func wrongLayer(err error) error {
	if err != nil && strings.Contains(err.Error(), "wrong diff id") {
		return fmt.Errorf("%w: %w", err, errdefs.ErrDataLoss)
	}
	return err
}

// gate waits for fetches that the unpacker, failing, left behind.
type gate struct {
	get  images.HandlerFunc
	work sync.WaitGroup

	mu     sync.Mutex // guards closed, and work's Add against its Wait
	closed bool
}

func (g *gate) enter(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	g.mu.Lock()
	if g.closed {
		g.mu.Unlock()
		return nil, context.Canceled
	}
	g.work.Add(1)
	g.mu.Unlock()
	defer g.work.Done()
	return g.get(ctx, desc)
}

func (g *gate) close() {
	g.mu.Lock()
	g.closed = true
	g.mu.Unlock()
	g.work.Wait()
}

// children lists what a blob points at, for one platform only, and labels it so
// that the collection keeps manifests and configurations. Layers get a label only if
// they are to be kept: once unpacked, the blob is not needed. An index that is not to be kept gets
// none either: another image may have it, with a label for another platform.
func (s *Store) children(platform platforms.MatchComparer, narrow bool) images.HandlerFunc {
	plain := images.ChildrenHandler(s.engine.content)
	plain = images.FilterPlatforms(plain, platform)
	plain = images.LimitManifests(plain, platform, 1)
	labels := images.ChildGCLabelsFilterLayers
	if s.settings().KeepLayers {
		labels = images.ChildGCLabels
	}
	labelled := images.SetChildrenMappedLabels(s.engine.content, plain, labels)
	return func(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
		if narrow && images.IsIndexType(desc.MediaType) {
			return plain(ctx, desc)
		}
		return labelled(ctx, desc)
	}
}

// newUnpacker makes what unpacks one image, a layer after the other, while those
// above are fetched.
func (s *Store) newUnpacker(ctx context.Context, route route) (*unpack.Unpacker, error) {
	applier := applier{content: s.engine.content, zstd: s.zstd, room: s.room}
	return unpack.NewUnpacker(ctx, s.engine.content,
		unpack.WithLimiter(semaphore.NewWeighted(int64(s.settings().MaxDownloads))),
		unpack.WithDuplicationSuppressor(route.locks),
		unpack.WithUnpackPlatform(unpack.Platform{
			Platform:       route.platform,
			SnapshotterKey: snapshotterKey,
			Snapshotter:    s.snapshots,
			Applier:        applier,
			ApplyOpts:      []diff.ApplyOpt{diff.WithProgress(unpackReport(route.report))},
		}))
}

func unpackReport(report func(Progress)) func(ocispec.Descriptor, int64) {
	return func(desc ocispec.Descriptor, done int64) {
		stage := StageUnpack
		if done >= desc.Size {
			stage = StageDone
		}
		report(Progress{Digest: desc.Digest.String(), Stage: stage, Done: done, Total: desc.Size})
	}
}
