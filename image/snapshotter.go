package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay/overlayutils"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	bolt "go.etcd.io/bbolt"
	"golang.org/x/sync/semaphore"

	"github.com/minicri/minicri/internal/tree"
)

// snapshotter is containerd's for overlayfs, with a sweep of its own. It hides that from the metadata database, which
// would delete directories in each collection, even in Open's, with a descriptor for each level.
//
// If the database cannot write a snapshot's record, as on a full disk, the library gives the number that names the
// snapshot's directory again and then removes the directory; making keeps others from making theirs meanwhile.
type snapshotter struct {
	snapshots.Snapshotter
	meta   overlay.MetaStore
	dir    string              // of the snapshots' directories
	making *semaphore.Weighted // held while a snapshot is made, and while unrecorded ones are set aside
}

// LayersDir is where the layers of images and containers are, below Config.Root.
func LayersDir(root string) string {
	return filepath.Join(root, "image", snapshotterKey, "snapshots")
}

func openSnapshotRecords(dir string, options *bolt.Options) (*storage.MetaStore, error) {
	return storage.NewMetaStore(filepath.Join(dir, snapshotDatabase), func(o *bolt.Options) error {
		*o = *options
		return nil
	})
}

// openOverlay makes removals cheap: the sweep deletes directories.
func openOverlay(ctx context.Context, dir string) (*snapshotter, error) {
	meta, err := openSnapshotRecords(dir, boltOptions())
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
	s := &snapshotter{
		Snapshotter: library, meta: meta, dir: filepath.Join(dir, "snapshots"), making: semaphore.NewWeighted(1),
	}
	// Opens the database: better an error at the start than at the first use.
	if _, err := s.setAside(ctx); err != nil {
		return nil, errors.Join(err, library.Close())
	}
	return s, nil
}

// Prepare makes a snapshot that is written to.
func (s *snapshotter) Prepare(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	done, err := s.make(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	return s.Snapshotter.Prepare(ctx, key, parent, opts...)
}

// View makes a snapshot that is only read.
func (s *snapshotter) View(ctx context.Context, key, parent string, opts ...snapshots.Opt) ([]mount.Mount, error) {
	done, err := s.make(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	return s.Snapshotter.View(ctx, key, parent, opts...)
}

// make takes the lock, unless ctx ends first: a disk that hangs keeps it.
func (s *snapshotter) make(ctx context.Context) (done func(), err error) {
	if !s.making.TryAcquire(1) && s.making.Acquire(ctx, 1) != nil {
		return nil, fmt.Errorf("wait for another snapshot to be made: %w", context.Cause(ctx))
	}
	return func() { s.making.Release(1) }, nil
}

// sweep deletes the directories that no record knows. Snapshots are made meanwhile.
func (s *snapshotter) sweep(ctx context.Context) error {
	paths, err := s.setAside(ctx)
	for _, path := range paths {
		if ctx.Err() != nil {
			return ctx.Err()
		}
		err = errors.Join(err, tree.Remove(path))
	}
	return err
}

// setAside returns the directories that no record knows. It gives the newest, whose number the next snapshot
// may have, another name; the others keep theirs, because a full disk may have no room for a name.
func (s *snapshotter) setAside(ctx context.Context) (paths []string, err error) {
	done, err := s.make(ctx)
	if err != nil {
		return nil, err
	}
	defer done()
	var recorded map[string]string
	err = s.meta.WithTransaction(ctx, false, func(ctx context.Context) error {
		recorded, err = storage.IDMap(ctx)
		return err
	})
	if err != nil && !errdefs.IsNotFound(err) { // not found: no snapshot was ever recorded
		return nil, err
	}
	all, err := os.ReadDir(s.dir)
	newest := 0
	for _, entry := range all {
		if number, err := strconv.Atoi(entry.Name()); err == nil {
			newest = max(newest, number)
		}
	}
	for _, entry := range all {
		name := entry.Name()
		if _, ok := recorded[name]; ok {
			continue
		}
		if name == strconv.Itoa(newest) {
			name = fmt.Sprintf("unrecorded-%s-%d", name, time.Now().UnixNano())
			if os.Rename(filepath.Join(s.dir, entry.Name()), filepath.Join(s.dir, name)) != nil {
				continue // until a later collection
			}
		}
		paths = append(paths, filepath.Join(s.dir, name))
	}
	return paths, err
}

// OpenToLook opens a store that is there, for List, Get and Describe alone. It changes
// nothing on the disk, which may be read-only, and leaves what a pull began to the next
// daemon. A store that another process holds is an ErrUnavailable.
//
// It reads the files of blobs and the records of layers itself, because the library's
// stores write to their directories when they are opened.
func OpenToLook(ctx context.Context, config Config) (*Store, error) {
	s, options := newStore(config), boltOptions()
	options.ReadOnly = true
	file, err := openDatabase(s.dir, options)
	if err != nil {
		return nil, fmt.Errorf("read image store %s: %w", s.dir, err)
	}
	meta, err := openSnapshotRecords(filepath.Join(s.dir, snapshotterKey), options)
	if err != nil {
		return nil, errors.Join(fmt.Errorf("read image store %s: open snapshots: %w", s.dir, err), file.Close())
	}
	s.assemble(file, blobFiles{dir: filepath.Join(s.dir, "content", "blobs")}, &snapshotter{Snapshotter: layerRecords{meta: meta}})
	if err := s.readRecords(s.scope(ctx)); err != nil {
		return nil, errors.Join(fmt.Errorf("read image store %s: %w", s.dir, err), s.Close())
	}
	return s, nil
}

// blobFiles reads the files of a content store. The database, open for reading, refuses
// the other methods of content.Store before it calls them.
type blobFiles struct {
	content.Store
	dir string
}

func (b blobFiles) ReaderAt(_ context.Context, desc ocispec.Descriptor) (content.ReaderAt, error) {
	return local.OpenReader(filepath.Join(b.dir, desc.Digest.Algorithm().String(), desc.Digest.Encoded()))
}

type layerRecords struct {
	snapshots.Snapshotter
	meta *storage.MetaStore
}

func (l layerRecords) Stat(ctx context.Context, key string) (info snapshots.Info, err error) {
	err = l.meta.WithTransaction(ctx, false, func(ctx context.Context) error {
		_, info, _, err = storage.GetInfo(ctx, key)
		return err
	})
	return info, err
}

func (l layerRecords) Close() error { return l.meta.Close() }
