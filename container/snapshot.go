package container

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"
)

// idLength is that of the ids that image stores' keys begin with.
const idLength = 64

// OfSnapshot is the id of the container that a snapshot is of, by its key.
func OfSnapshot(key string) string { return key[:min(idLength, len(key))] }

// SnapshotsWithoutContainer are the keys of writable layers, and of mounted images,
// that no container explains. They are listed first, and the containers asked for
// then: a record is written before a layer is made.
func (s *Store) SnapshotsWithoutContainer(ctx context.Context) ([]string, error) {
	keys, err := s.options.Images.Snapshots(ctx)
	orphans := []string{}
	for _, key := range keys {
		if !s.explains(OfSnapshot(key)) {
			orphans = append(orphans, key)
		}
	}
	return orphans, err
}

// RemoveSnapshot removes a snapshot that no container explains; of one that a
// container has it is an ErrFailedPrecondition.
func (s *Store) RemoveSnapshot(ctx context.Context, key string) error {
	if id := OfSnapshot(key); s.explains(id) {
		return fmt.Errorf("snapshot %s belongs to container %s: remove that: %w", key, id, errdefs.ErrFailedPrecondition)
	}
	err := s.options.Images.RemoveSnapshot(ctx, key)
	s.noteRemoved("snapshot", key, err)
	return err
}

// sweepSnapshots removes those that no container explains.
func (s *Store) sweepSnapshots(ctx context.Context) {
	keys, err := s.SnapshotsWithoutContainer(ctx)
	if err != nil {
		s.options.Logger.Error("sweep", "err", err)
	}
	for _, key := range keys {
		_ = s.RemoveSnapshot(ctx, key) // logged there
	}
}
