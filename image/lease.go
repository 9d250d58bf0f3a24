package image

import (
	"context"
	"fmt"

	"github.com/containerd/containerd/v2/core/leases"
)

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
		s.collector.soon()
	}
	return leases.WithLease(ctx, held.ID), release, nil
}

// dropLeases deletes all: a lease belongs to a pull, and none runs yet.
func (s *Store) dropLeases(ctx context.Context) error {
	left, err := s.leases.List(ctx)
	if err != nil {
		return fmt.Errorf("list leases: %w", err)
	}
	for _, l := range left {
		if err := s.leases.Delete(ctx, l); err != nil {
			return fmt.Errorf("drop lease %s: %w", l.ID, err)
		}
	}
	return nil
}
