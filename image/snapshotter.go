package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay/overlayutils"
	"github.com/containerd/errdefs"
	bolt "go.etcd.io/bbolt"

	"github.com/minicri/minicri/internal/tree"
)

// snapshotter is containerd's for overlayfs, with a sweep of its own, which the
// metadata database does not see: it would delete directories within each
// collection, also within that of Open, which serving waits for.
//
// A snapshot's directory is named by a number, and the number is given again when
// the database cannot write the record, on a full disk above all. The library
// removes the directory after that, by its name: making keeps others from having
// made theirs by then.
type snapshotter struct {
	snapshots.Snapshotter
	meta overlay.MetaStore
	dir  string // of the snapshots' directories

	making sync.Mutex // held while a snapshot is made, and while unrecorded ones are listed
}

// LayersDir is where the layers of images are, and those of containers, below the
// daemon's durable directory.
func LayersDir(root string) string {
	return filepath.Join(root, "image", snapshotterKey, "snapshots")
}

// openOverlay makes removals cheap: directories are deleted by the sweep.
func openOverlay(ctx context.Context, dir string) (*snapshotter, error) {
	meta, err := storage.NewMetaStore(filepath.Join(dir, "metadata.db"), func(o *bolt.Options) error {
		*o = *boltOptions()
		return nil
	})
	if err != nil {
		return nil, err
	}
	options := []overlay.Opt{overlay.AsynchronousRemove, overlay.WithMetaStore(meta), overlay.WithUpperdirLabel}
	if ok, err := overlayutils.SupportsIDMappedMounts(); err == nil && ok {
		options = append(options, overlay.WithRemapIDs)
	}
	library, err := overlay.NewSnapshotter(dir, options...)
	if err != nil {
		return nil, errors.Join(err, meta.Close())
	}
	s := &snapshotter{Snapshotter: library, meta: meta, dir: filepath.Join(dir, "snapshots")}
	// The library would open the database at its first use: better an error
	// at the start if it cannot be opened. A predecessor may have been killed
	// between making a directory and its record.
	if _, err := s.unrecorded(ctx); err != nil {
		return nil, errors.Join(err, library.Close())
	}
	return s, nil
}

// Prepare makes a snapshot that is written to.
func (s *snapshotter) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	s.making.Lock()
	defer s.making.Unlock()
	return s.Snapshotter.Prepare(ctx, key, parent, opts...)
}

// View makes a snapshot that is only read.
func (s *snapshotter) View(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	s.making.Lock()
	defer s.making.Unlock()
	return s.Snapshotter.View(ctx, key, parent, opts...)
}

// sweep deletes the directories that no record knows: those of removed
// snapshots, and of ones that were never recorded. Snapshots are made meanwhile.
func (s *snapshotter) sweep(ctx context.Context) error {
	paths, err := s.unrecorded(ctx)
	for _, path := range paths {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		err = errors.Join(err, tree.Remove(path))
	}
	return err
}

// unrecorded returns the directories that no record knows. None of them has the
// number of a snapshot to come: the one that might is given another name.
func (s *snapshotter) unrecorded(ctx context.Context) (paths []string, err error) {
	s.making.Lock()
	defer s.making.Unlock()
	var recorded map[string]string
	err = s.meta.WithTransaction(ctx, false, func(ctx context.Context) error {
		recorded, err = storage.IDMap(ctx)
		return err
	})
	if err != nil && !errdefs.IsNotFound(err) { // not found: no snapshot was ever recorded
		return nil, err
	}
	all, err := os.ReadDir(s.dir)
	if err != nil {
		return nil, err
	}
	newest := newestOf(all)
	for _, entry := range all {
		name := entry.Name()
		if _, ok := recorded[name]; ok {
			continue
		}
		if name == newest {
			if name, err = s.moveAway(name); err != nil {
				continue
			}
		}
		paths = append(paths, filepath.Join(s.dir, name))
	}
	return paths, err
}

// newestOf returns the largest number among the names, "" if there is none. The
// next snapshot's is not larger than that by more than one.
func newestOf(all []os.DirEntry) (name string) {
	var newest uint64
	for _, entry := range all {
		if number, err := strconv.ParseUint(entry.Name(), 10, 64); err == nil && number >= newest {
			newest, name = number, entry.Name()
		}
	}
	return name
}

// moveAway gives a directory another name, which is no snapshot's.
func (s *snapshotter) moveAway(name string) (moved string, err error) {
	moved = fmt.Sprintf("unrecorded-%s-%d", name, time.Now().UnixNano())
	return moved, os.Rename(filepath.Join(s.dir, name), filepath.Join(s.dir, moved))
}
