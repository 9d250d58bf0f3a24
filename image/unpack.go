package image

import (
	"context"
	"fmt"
	"sync"

	"github.com/containerd/containerd/v2/core/diff"
	"github.com/containerd/containerd/v2/core/diff/apply"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/unpack"
	"github.com/containerd/errdefs"
	"github.com/containerd/platforms"
	"github.com/moby/sys/userns"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"golang.org/x/sync/semaphore"
)

// unpackTree walks from target to the configuration of the node's platform and
// unpacks its layers. get makes a blob present before it is read. It returns
// when every layer is a committed snapshot, or, after an error, when all work
// has ended.
func (s *Store) unpackTree(ctx context.Context, target ocispec.Descriptor, get images.HandlerFunc, report func(Progress)) error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	unpacker, err := s.newUnpacker(ctx, report)
	if err != nil {
		return fmt.Errorf("prepare to unpack: %w", err)
	}
	gate := &gate{get: get}
	handler := images.Handlers(images.HandlerFunc(gate.enter), images.HandlerFunc(s.refuseForeign), s.children())
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
	return unpackErr
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

// children lists what a blob points at, for the node's platform only, and labels
// it so that the collection keeps manifests and configurations. Layers get no
// label: unpacked, the blob is of no use any more.
func (s *Store) children() images.HandlerFunc {
	h := images.ChildrenHandler(s.engine.content)
	h = images.FilterPlatforms(h, nodePlatform())
	h = images.LimitManifests(h, nodePlatform(), 1)
	return images.SetChildrenMappedLabels(s.engine.content, h, images.ChildGCLabelsFilterLayers)
}

func (s *Store) newUnpacker(ctx context.Context, report func(Progress)) (*unpack.Unpacker, error) {
	platform := unpack.Platform{
		Platform:       nodePlatform(),
		SnapshotterKey: snapshotterKey,
		Snapshotter:    s.snapshots,
		Applier:        inPlace{apply.NewFileSystemApplier(s.engine.content)},
		ApplyOpts: []diff.ApplyOpt{
			// Each layer by itself, before its snapshot is committed: it goes on
			// beside the unpacking of other layers.
			diff.WithSyncFs(!s.config.NoSync),
			diff.WithProgress(unpackReport(report)),
		},
	}
	options := []unpack.UnpackerOpt{
		unpack.WithLimiter(semaphore.NewWeighted(int64(s.config.MaxDownloads))),
		unpack.WithDuplicationSuppressor(s.locks),
	}
	// Side by side needs device nodes for whiteouts, which a user namespace
	// does not allow.
	if !userns.RunningInUserNS() {
		platform.SnapshotterCapabilities = []string{snapshots.RebaseCap}
		options = append(options, unpack.WithUnpackLimiter(semaphore.NewWeighted(int64(s.config.MaxUnpacks))))
	}
	return unpack.NewUnpacker(ctx, s.engine.content, append(options, unpack.WithUnpackPlatform(platform))...)
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

// inPlace unpacks a bottom layer, too, straight into its directory. The library
// would bind mount it below /tmp first, which a kill would leave behind.
type inPlace struct{ diff.Applier }

func (a inPlace) Apply(ctx context.Context, desc ocispec.Descriptor, mounts []mount.Mount, opts ...diff.ApplyOpt) (ocispec.Descriptor, error) {
	if len(mounts) == 1 && mounts[0].Type == "bind" {
		mounts = []mount.Mount{{Type: "overlay", Source: "overlay", Options: []string{"upperdir=" + mounts[0].Source}}}
	}
	applied, err := a.Applier.Apply(ctx, desc, mounts, opts...)
	if err != nil {
		return applied, fmt.Errorf("unpack layer %s: %w", desc.Digest, err)
	}
	return applied, nil
}

// refuseForeign ends the pull of an image that this node cannot run, before its
// layers are fetched; the unpacker would skip it without a word.
func (s *Store) refuseForeign(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	if !images.IsConfigType(desc.MediaType) {
		return nil, nil
	}
	spec, err := s.readSpec(ctx, desc)
	if err != nil {
		return nil, err
	}
	if !nodePlatform().Match(spec.Platform) {
		return nil, fmt.Errorf("the image is for %s, not for this node: %w", platforms.Format(spec.Platform), errdefs.ErrNotFound)
	}
	return nil, nil
}
