package image

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/metadata"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/containerd/v2/plugins/content/local"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	bolt "go.etcd.io/bbolt"
)

// OpenToLook opens a store that is there, for List, Get, Describe and Snapshots alone:
// nothing on the disk changes, and downloads that a predecessor began stay for the next
// daemon to decide about. A store that another process changes is an ErrUnavailable.
func OpenToLook(ctx context.Context, config Config) (*Store, error) {
	config.setDefaults()
	dir := filepath.Join(config.Root, "image")
	engine, err := openEngineToLook(dir)
	if err != nil {
		return nil, fmt.Errorf("read image store %s: %w", dir, err)
	}
	s := newStore(config, dir, engine)
	close(s.collector.done) // it never starts, and Close waits for its end
	if err := s.loadCatalog(s.scope(ctx)); err != nil {
		return nil, errors.Join(fmt.Errorf("read image store %s: %w", dir, err), s.Close())
	}
	return s, nil
}

// openEngineToLook makes no use of the library's stores of blobs and layers: to open
// these writes to their directories.
func openEngineToLook(dir string) (*engine, error) {
	options := boltOptions()
	options.ReadOnly = true
	file, err := openDatabase(dir, options)
	if err != nil {
		return nil, err
	}
	meta, err := storage.NewMetaStore(filepath.Join(dir, snapshotterKey, "metadata.db"), func(o *bolt.Options) error {
		*o = *options
		return nil
	})
	if err != nil {
		return nil, errors.Join(fmt.Errorf("open snapshots: %w", err), file.Close())
	}
	layers := &snapshotter{Snapshotter: seenLayers{meta: meta}, meta: meta}
	db := metadata.NewDB(file, seenBlobs{dir: filepath.Join(dir, "content", "blobs")}, map[string]snapshots.Snapshotter{snapshotterKey: layers})
	return &engine{db: db, content: db.ContentStore(), overlay: layers}, nil
}

// seenBlobs are the files of a content store. What else a content.Store does, the
// database refuses first, as it is open for reading.
type seenBlobs struct {
	content.Store
	dir string
}

func (b seenBlobs) ReaderAt(_ context.Context, desc ocispec.Descriptor) (content.ReaderAt, error) {
	return local.OpenReader(filepath.Join(b.dir, desc.Digest.Algorithm().String(), desc.Digest.Encoded()))
}

// seenLayers are the records of a snapshotter.
type seenLayers struct {
	snapshots.Snapshotter
	meta *storage.MetaStore
}

func (l seenLayers) Stat(ctx context.Context, key string) (info snapshots.Info, err error) {
	err = l.meta.WithTransaction(ctx, false, func(ctx context.Context) error {
		_, info, _, err = storage.GetInfo(ctx, key)
		return err
	})
	return info, err
}

func (l seenLayers) Close() error { return l.meta.Close() }
