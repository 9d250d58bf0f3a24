package image

import (
	"context"
	"errors"
	"fmt"
	"io/fs"
	"path/filepath"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/snapshots"

	"github.com/minicri/minicri/internal/tree"
)

// upperdirLabel is where the overlay snapshotter says which directory holds a
// snapshot's files.
const upperdirLabel = "containerd.io/snapshot/overlay.upperdir"

// Usage is what something takes on the disk.
type Usage struct {
	Bytes      uint64
	Inodes     uint64
	Mountpoint string    // directory on the filesystem in question
	Time       time.Time // when it was measured
}

// ImageUsage measures manifests, configurations, downloads and unpacked layers.
// The sizes of unpacked layers are known; no directory is walked.
func (s *Store) ImageUsage(ctx context.Context) (Usage, error) {
	ctx = s.scope(ctx)
	total := Usage{Mountpoint: s.dir, Time: time.Now()}
	err := s.engine.content.Walk(ctx, func(info content.Info) error {
		total.add(info.Size, 1)
		return nil
	})
	if err != nil {
		return Usage{}, fmt.Errorf("measure images: %w", err)
	}
	err = s.snapshots.Walk(ctx, func(ctx context.Context, info snapshots.Info) error {
		if info.Kind != snapshots.KindCommitted {
			return nil
		}
		usage, err := s.snapshots.Usage(ctx, info.Name)
		total.add(usage.Size, usage.Inodes)
		return err
	})
	if err != nil {
		return Usage{}, fmt.Errorf("measure unpacked layers: %w", err)
	}
	return total, nil
}

// ContainerUsage measures the writable layers of all containers.
func (s *Store) ContainerUsage(ctx context.Context) (Usage, error) {
	keys, err := s.Snapshots(ctx)
	if err != nil {
		return Usage{}, err
	}
	total := Usage{Mountpoint: s.dir, Time: time.Now()}
	for _, key := range keys {
		usage, err := s.SnapshotUsage(ctx, key)
		if err != nil {
			s.log.Debug("snapshot not measured", "snapshot", key, "error", err)
			continue
		}
		total.Bytes += usage.Bytes
		total.Inodes += usage.Inodes
		if usage.Time.Before(total.Time) {
			total.Time = usage.Time
		}
	}
	return total, nil
}

// SnapshotUsage measures the writable layer of one container by walking it, and
// with it the volumes that its image declares: they too are the container's own
// files, and nothing else counts them. A measurement is good for usageAge.
func (s *Store) SnapshotUsage(ctx context.Context, key string) (Usage, error) {
	last, _ := s.usage.Load(key)
	if usage, ok := last.(Usage); ok && time.Since(usage.Time) < usageAge {
		return usage, nil
	}
	usage := Usage{Mountpoint: s.dir, Time: time.Now()}
	snapshot, err := s.snapshots.Stat(s.scope(ctx), key)
	if err != nil {
		return Usage{}, fmt.Errorf("measure snapshot %s: %w", key, err)
	}
	if snapshot.Kind == snapshots.KindActive {
		if err := usage.addTree(ctx, snapshot.Labels[upperdirLabel]); err != nil {
			return Usage{}, fmt.Errorf("measure snapshot %s: %w", key, err)
		}
	}
	if s.config.VolumesDir != "" {
		if err := usage.addTree(ctx, filepath.Join(s.config.VolumesDir, key)); err != nil && !errors.Is(err, fs.ErrNotExist) {
			return Usage{}, fmt.Errorf("measure volumes of %s: %w", key, err)
		}
	}
	s.usage.Store(key, usage)
	return usage, nil
}

func (u *Usage) addTree(ctx context.Context, path string) error {
	measured, err := tree.Measure(ctx, path)
	u.add(measured.Bytes, measured.Inodes)
	return err
}

func (u *Usage) add(bytes, inodes int64) {
	u.Bytes += uint64(max(bytes, 0))
	u.Inodes += uint64(max(inodes, 0))
}

// usageAge is the kubelet's period of housekeeping: asking more often than that
// for the same thing walks no directory.
const usageAge = 10 * time.Second
