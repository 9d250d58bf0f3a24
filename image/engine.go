package image

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/metadata"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/core/snapshots/storage"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay"
	"github.com/containerd/containerd/v2/plugins/snapshots/overlay/overlayutils"
	"github.com/containerd/errdefs"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
)

// snapshotterKey names the snapshotter in the database and its directory.
const snapshotterKey = "overlayfs"

// lockTimeout is how long Open waits for a store that is just being closed.
const lockTimeout = 2 * time.Second

// engine is containerd's stores, put together. It is the only place that sees
// containerd's plugins, which its release notes do not promise to keep stable.
type engine struct {
	db      *metadata.DB
	content content.Store         // through db: leased and labelled
	overlay snapshots.Snapshotter // below db: keys are internal names
	// compared says that compareDisk has run since the start.
	compared atomic.Bool
}

func openEngine(ctx context.Context, dir string) (_ *engine, err error) {
	file, err := bolt.Open(filepath.Join(dir, "meta.db"), 0o600, boltOptions())
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("held by another process, is a daemon running? %w", errdefs.ErrUnavailable)
	}
	if err != nil {
		return nil, fmt.Errorf("open meta.db: %w", err)
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close())
		}
	}()
	blobs, err := openContent(filepath.Join(dir, "content"))
	if err != nil {
		return nil, fmt.Errorf("open content: %w", err)
	}
	layers, err := openOverlay(ctx, filepath.Join(dir, snapshotterKey))
	if err != nil {
		return nil, fmt.Errorf("open snapshots: %w", err)
	}
	db := metadata.NewDB(file, blobs, map[string]snapshots.Snapshotter{snapshotterKey: noCleaner{layers}})
	if err := db.Init(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("prepare meta.db: %w", err), layers.Close())
	}
	return &engine{db: db, content: db.ContentStore(), overlay: layers}, nil
}

// openContent removes unfinished downloads: they belong to pulls of a
// predecessor, and the library does not see those that it was killed at the very
// beginning of.
func openContent(dir string) (content.Store, error) {
	if err := os.RemoveAll(filepath.Join(dir, "ingest")); err != nil {
		return nil, err
	}
	for _, d := range []string{"ingest", "blobs/sha256"} {
		if err := os.MkdirAll(filepath.Join(dir, d), 0o755); err != nil {
			return nil, err
		}
	}
	return local.NewStore(dir)
}

// openOverlay makes removals cheap: directories are deleted by the collection.
func openOverlay(ctx context.Context, dir string) (snapshots.Snapshotter, error) {
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
	snapshotter, err := overlay.NewSnapshotter(dir, options...)
	if err != nil {
		return nil, err
	}
	// The library would open the database at its first use: better an error
	// at the start if it cannot be opened.
	err = meta.WithTransaction(ctx, false, func(ctx context.Context) error {
		return moveUnrecorded(ctx, filepath.Join(dir, "snapshots"))
	})
	if err != nil {
		return nil, errors.Join(err, snapshotter.Close())
	}
	return snapshotter, nil
}

// moveUnrecorded renames the newest snapshot's directory if the database does not
// know it: a predecessor was killed between making it and its record. The next
// snapshot has that number. A sweep deletes the directory.
func moveUnrecorded(ctx context.Context, dir string) error {
	all, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	var newest uint64
	for _, entry := range all {
		if number, err := strconv.ParseUint(entry.Name(), 10, 64); err == nil {
			newest = max(newest, number)
		}
	}
	recorded, err := storage.IDMap(ctx)
	if err != nil && !errdefs.IsNotFound(err) { // not found: no snapshot was ever recorded
		return err
	}
	name := strconv.FormatUint(newest, 10)
	if _, ok := recorded[name]; ok || newest == 0 {
		return nil
	}
	return os.Rename(filepath.Join(dir, name), filepath.Join(dir, fmt.Sprintf("unrecorded-%s-%d", name, time.Now().UnixNano())))
}

// boltOptions never has NoSync: the records are what makes an image exist.
func boltOptions() *bolt.Options {
	return &bolt.Options{
		Timeout:        lockTimeout,
		NoFreelistSync: true,
		FreelistType:   bolt.FreelistMapType,
		NoStatistics:   true,
	}
}

// noCleaner hides that directories can be deleted: the database would do it
// within each collection, also within that of Open, which serving waits for.
type noCleaner struct{ snapshots.Snapshotter }

// compareDisk makes the next mark remove what is on the disk but
// not in the database: a predecessor was killed between the two. The library
// compares them only after a removal, so something is made and removed.
func (e *engine) compareDisk(ctx context.Context) error {
	const probe = "minicri: removed at once"
	desc := ocispec.Descriptor{Digest: digest.FromString(probe), Size: int64(len(probe))}
	if err := content.WriteBlob(ctx, e.content, probe, strings.NewReader(probe), desc); err != nil {
		return err
	}
	if err := e.content.Delete(ctx, desc.Digest); err != nil {
		return err
	}
	layers := e.db.Snapshotter(snapshotterKey)
	if _, err := layers.Prepare(ctx, probe, ""); err != nil && !errdefs.IsAlreadyExists(err) {
		return err
	}
	if err := layers.Remove(ctx, probe); err != nil {
		return err
	}
	e.compared.Store(true)
	return nil
}

// mark removes what no record, lease or container holds, but for directories.
func (e *engine) mark(ctx context.Context) error {
	_, err := e.db.GarbageCollect(ctx)
	return err
}

// sweep deletes the directories of removed snapshots. Before the first snapshot
// was ever made the library finds no list of them.
func (e *engine) sweep(ctx context.Context) error {
	err := e.overlay.(snapshots.Cleaner).Cleanup(ctx)
	if errdefs.IsNotFound(err) {
		return nil
	}
	return err
}

func (e *engine) close() error {
	return errors.Join(e.overlay.Close(), e.db.Close())
}
