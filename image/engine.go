package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/metadata"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/sirupsen/logrus"
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
	content content.Store // through db: leased and labelled
	overlay *snapshotter  // below db: keys are internal names
	// compared says that compareDisk has run since the start.
	compared atomic.Bool
}

func openDatabase(dir string, options *bolt.Options) (*bolt.DB, error) {
	file, err := bolt.Open(filepath.Join(dir, "meta.db"), 0o600, options)
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("held by another process, is a daemon running? %w", errdefs.ErrUnavailable)
	}
	if err != nil {
		return nil, fmt.Errorf("open meta.db: %w", err)
	}
	return file, nil
}

func openEngine(ctx context.Context, dir string) (_ *engine, err error) {
	file, err := openDatabase(dir, boltOptions())
	if err != nil {
		return nil, err
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
	db := metadata.NewDB(file, blobs, map[string]snapshots.Snapshotter{snapshotterKey: layers})
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

func boltOptions() *bolt.Options {
	return &bolt.Options{
		Timeout:        lockTimeout,
		NoFreelistSync: true,
		FreelistType:   bolt.FreelistMapType,
		NoStatistics:   true,
	}
}

// compareDisk makes the next mark remove what is on the disk but
// not in the database: a predecessor was killed between the two. The library
// compares them only after a removal, so something is made and removed.
func (e *engine) compareDisk(ctx context.Context) error {
	const probe = "minicri: removed at once"
	desc := ocispec.Descriptor{Digest: digest.FromString(probe), Size: int64(len(probe))}
	// A reference of its own each time: the library keeps one locked whose record the
	// disk did not take, and waits for it without end.
	reference := fmt.Sprintf("%s %d", probe, time.Now().UnixNano())
	if err := content.WriteBlob(ctx, e.content, reference, strings.NewReader(probe), desc); err != nil {
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

func (e *engine) close() error {
	return errors.Join(e.overlay.Close(), e.db.Close())
}

// libraryLog passes what containerd's packages log to logger, all of it for
// debugging: what went wrong they also return, and what they find worth a line
// (a mirror that did not answer, TLS tried before HTTP) comes with every pull.
func libraryLog(logger *slog.Logger) *log.Entry {
	library := logrus.New()
	library.SetOutput(io.Discard)
	library.SetLevel(logrus.DebugLevel)
	library.AddHook(debugHook{logger})
	return logrus.NewEntry(library)
}

type debugHook struct{ logger *slog.Logger }

func (debugHook) Levels() []logrus.Level { return logrus.AllLevels }

func (h debugHook) Fire(entry *logrus.Entry) error {
	if !h.logger.Enabled(entry.Context, slog.LevelDebug) {
		return nil
	}
	fields := []any{"library_level", entry.Level.String()}
	for key, value := range entry.Data {
		fields = append(fields, key, value)
	}
	h.logger.Debug(entry.Message, fields...)
	return nil
}
