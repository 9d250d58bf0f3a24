package container

import "context"

// idLength is that of the ids that image stores' keys begin with.
const idLength = 64

// SnapshotsWithoutContainer are the keys of writable layers, and of mounted images,
// that no container explains. They are listed first, and the containers asked for
// then: a record is written before a layer is made.
func (s *Store) SnapshotsWithoutContainer(ctx context.Context) ([]string, error) {
	keys, err := s.options.Images.Snapshots(ctx)
	orphans := []string{}
	for _, key := range keys {
		if !s.explains(key[:min(idLength, len(key))]) {
			orphans = append(orphans, key)
		}
	}
	return orphans, err
}

// sweepSnapshots removes them.
func (s *Store) sweepSnapshots(ctx context.Context) {
	keys, err := s.SnapshotsWithoutContainer(ctx)
	if err != nil {
		s.options.Logger.Error("sweep", "err", err)
	}
	for _, key := range keys {
		s.noteRemoved("snapshot", key, s.options.Images.RemoveSnapshot(ctx, key))
	}
}
