package image

import (
	"context"
	"fmt"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

// Collect removes what no record, lease or container holds: blobs, unfinished
// downloads, snapshots and their directories. The database is locked for the
// marking only. The store calls it by itself; it is exported for those who
// cannot wait.
func (s *Store) Collect(ctx context.Context) error {
	ctx = s.scope(ctx)
	if _, err := s.db.GarbageCollect(ctx); err != nil {
		return fmt.Errorf("collect images: %w", err)
	}
	if err := s.overlay.sweep(ctx); err != nil {
		return fmt.Errorf("delete layers: %w", err)
	}
	if s.compared.Load() {
		return nil
	}
	if err := s.compareDisk(ctx); err != nil { // a full disk, above all
		s.log.Warn("images are not compared with the disk yet: the next collection retries", "error", err)
		return nil
	}
	s.compared.Store(true)
	return s.Collect(ctx)
}

// compareDisk makes the next collection remove what is on the disk but
// not in the database: a predecessor was killed between the two. The library
// compares them only after a removal, so something is made and removed.
func (s *Store) compareDisk(ctx context.Context) error {
	const probe = "minicri: removed at once"
	desc := ocispec.Descriptor{Digest: digest.FromString(probe), Size: int64(len(probe))}
	// A reference of its own each time: the library keeps one locked whose record the
	// disk did not take, and waits for it without end.
	reference := fmt.Sprintf("%s %d", probe, time.Now().UnixNano())
	if err := content.WriteBlob(ctx, s.content, reference, strings.NewReader(probe), desc); err != nil {
		return err
	}
	if err := s.content.Delete(ctx, desc.Digest); err != nil {
		return err
	}
	if _, err := s.snapshots.Prepare(ctx, probe, ""); err != nil && !errdefs.IsAlreadyExists(err) {
		return err
	}
	return s.snapshots.Remove(ctx, probe)
}

// collectSoon has a collection run a while later, one for a burst of removals.
func (s *Store) collectSoon() {
	if s.asked.Swap(true) || s.begin() != nil {
		return
	}
	go func() {
		defer s.work.Done()
		select {
		case <-time.After(s.config.CollectDelay):
		case <-s.ctx.Done():
			return
		}
		s.collecting.Lock()
		defer s.collecting.Unlock()
		s.asked.Store(false)
		if err := s.Collect(s.ctx); err != nil && s.ctx.Err() == nil {
			s.log.Error("garbage collection of images failed: it is retried after the next removal", "error", err)
		}
	}()
}

// lease keeps what is made under the returned context from being collected until
// release, which also asks for a collection of what was not recorded.
func (s *Store) lease(ctx context.Context) (_ context.Context, release func(), err error) {
	held, err := s.leases.Create(ctx, leases.WithRandomID())
	if err != nil {
		return nil, nil, fmt.Errorf("lease: %w", err)
	}
	release = func() {
		if err := s.leases.Delete(context.WithoutCancel(ctx), held); err != nil {
			s.log.Error("a lease could not be deleted: its content stays until the next start", "lease", held.ID, "error", err)
		}
		s.collectSoon()
	}
	return leases.WithLease(ctx, held.ID), release, nil
}
