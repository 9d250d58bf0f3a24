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
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/metadata"
	"github.com/containerd/containerd/v2/core/mount"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/containerd/v2/plugins/content/local"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/opencontainers/go-digest"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	"github.com/sirupsen/logrus"
	logrusslog "github.com/sirupsen/logrus/hooks/slog"
	bolt "go.etcd.io/bbolt"
	bolterrors "go.etcd.io/bbolt/errors"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/state"
)

// Config says where a Store lives and how it pulls. Zero values are replaced by the defaults named at each field.
type Config struct {
	Root            string        // the daemon's durable directory; the store uses Root/image
	CertsDirs       []string      // searched in order for <host>/hosts.toml at each pull
	DockerConfig    string        // a docker config.json for hosts that a pull brings no credentials for; "" for none
	VerifierDir     string        // executables that must all accept an image before it is fetched; "" for none
	VerifierTimeout time.Duration // how long one of them may take; default 10 seconds
	Pinned          []string      // references whose images are reported as pinned
	ProgressTimeout time.Duration // ends a pull whose registry sends no byte for so long; default 1 minute
	MinRate         int64         // ends a pull with fewer bytes per second, on average over ProgressTimeout; 0 for none
	MaxDownloads    int           // how many blobs one pull fetches at once; default 3
	KeepLayers      bool          // keeps layers as they came, after they are unpacked
	CollectDelay    time.Duration // how long after a removal garbage is collected; default 2 seconds
	VolumesDir      string        // of the volumes that images declare, a directory for each container; "" for none
	Logger          *slog.Logger  // receives what has no caller to return it to; default slog.Default
	// Observe, if set, is called when a pull ends.
	Observe func(took time.Duration, bytes int64, err error)

	waitWindow time.Duration   // shorter in tests
	pinned     map[string]bool // Pinned, normalised
}

func (c *Config) setDefaults() {
	setDefault(&c.ProgressTimeout, time.Minute)
	setDefault(&c.VerifierTimeout, 10*time.Second)
	setDefault(&c.waitWindow, waitWindow)
	setDefault(&c.MaxDownloads, 3)
	setDefault(&c.CollectDelay, 2*time.Second)
	if c.Observe == nil {
		c.Observe = func(time.Duration, int64, error) {}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
	c.pinned = map[string]bool{}
	for _, text := range c.Pinned {
		if ref, err := ParseReference(text); err == nil {
			c.pinned[ref.String()] = true
		}
	}
}

func setDefault[T ~int | ~int64](field *T, value T) {
	if *field <= 0 {
		*field = value
	}
}

// Store is the node's images, for any goroutine.
type Store struct {
	config     Config
	underWay   pullsUnderWay
	reloaded   atomic.Pointer[Config] // the settings of pulls, see Reconfigure
	dir        string
	log        *slog.Logger
	libraryLog *log.Entry // log for containerd's packages

	db        *metadata.DB
	content   content.Store // through db: leased and labelled
	images    images.Store
	leases    leases.Manager
	snapshots snapshots.Snapshotter // through db
	overlay   *snapshotter          // below db: keys are internal names

	changing *semaphore.Weighted     // held while records change and are read anew
	list     atomic.Pointer[[]Image] // the complete images, sorted by id
	locks    locks
	room     *room
	zstd     places

	// ctx ends with the store, and with it the pulls and collections in work.
	ctx        context.Context
	end        context.CancelCauseFunc
	work       sync.WaitGroup
	closing    sync.Mutex          // orders begin and Close
	collecting *semaphore.Weighted // held by a collection in the background, and by Remove's
	asked      atomic.Bool         // whether a collection is to begin
	compared   atomic.Bool         // whether compareDisk has run since the start

	unmounted errgroup.Group // ends file systems that are mounted nowhere any more
}

const (
	snapshotterKey   = "overlayfs" // in the database, and the directory
	database         = "meta.db"
	snapshotDatabase = "metadata.db"
	closeLimit       = 2 * time.Second // for another process to close the store
)

// Open opens or makes the store below config.Root. It forgets what a killed predecessor left half done, which is
// deleted in the background. A store that another process holds is an ErrUnavailable.
func Open(ctx context.Context, config Config) (*Store, error) {
	s := newStore(config)
	if err := s.open(ctx); err != nil {
		return nil, fmt.Errorf("open image store %s: %w", s.dir, err)
	}
	if err := s.recover(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("open image store %s: %w", s.dir, err), s.Close())
	}
	s.warnOfRegistries()
	s.collectSoon() // directories that a predecessor left
	return s, nil
}

func newStore(config Config) *Store {
	config.setDefaults()
	dir := filepath.Join(config.Root, "image")
	s := &Store{
		config: config, dir: dir, log: config.Logger, libraryLog: libraryLog(config.Logger, &redact.Secrets{}),
		locks: locks{byKey: map[string]*lock{}}, room: &room{dir: dir}, zstd: newPlaces(), collecting: semaphore.NewWeighted(1),
		changing: semaphore.NewWeighted(1),
	}
	s.ctx, s.end = context.WithCancelCause(context.Background())
	s.unmounted.SetLimit(closesAtOnce)
	s.reloaded.Store(&config)
	return s
}

func boltOptions() *bolt.Options {
	return &bolt.Options{
		Timeout:        closeLimit,
		NoFreelistSync: true,
		FreelistType:   bolt.FreelistMapType,
		NoStatistics:   true,
	}
}

// openDatabase waits a moment for a process that holds the database.
func openDatabase(dir string, options *bolt.Options) (*bolt.DB, error) {
	file, err := bolt.Open(filepath.Join(dir, database), 0o600, options)
	if errors.Is(err, bolterrors.ErrTimeout) {
		return nil, fmt.Errorf("held by another process, is a daemon running? %w", errdefs.ErrUnavailable)
	}
	if err != nil {
		return nil, fmt.Errorf("open meta.db: %w", err)
	}
	return file, nil
}

func (s *Store) open(ctx context.Context) (err error) {
	if err := errors.Join(os.MkdirAll(s.dir, 0o700), os.MkdirAll(filepath.Join(s.dir, emptyDir), 0o755)); err != nil {
		return err
	}
	// A daemon that is doomed has them locked, too.
	err = errors.Join(state.FreeLock(filepath.Join(s.dir, database)), state.FreeLock(filepath.Join(s.dir, snapshotterKey, snapshotDatabase)))
	if err != nil {
		return err
	}
	file, err := openDatabase(s.dir, boltOptions())
	if err != nil {
		return err
	}
	defer func() {
		if err != nil {
			err = errors.Join(err, file.Close())
		}
	}()
	blobs, err := openContent(filepath.Join(s.dir, "content"))
	if err != nil {
		return fmt.Errorf("open content: %w", err)
	}
	layers, err := openOverlay(ctx, filepath.Join(s.dir, snapshotterKey))
	if err != nil {
		return fmt.Errorf("open snapshots: %w", err)
	}
	s.assemble(file, blobs, layers)
	if err := s.db.Init(ctx); err != nil {
		return errors.Join(fmt.Errorf("prepare meta.db: %w", err), layers.Close())
	}
	return nil
}

func (s *Store) assemble(file *bolt.DB, blobs content.Store, layers *snapshotter) {
	s.overlay, s.db = layers, metadata.NewDB(file, blobs, map[string]snapshots.Snapshotter{snapshotterKey: layers})
	s.content, s.snapshots = s.db.ContentStore(), s.db.Snapshotter(snapshotterKey)
	s.images, s.leases = metadata.NewImageStore(s.db), metadata.NewLeaseManager(s.db)
}

// openContent removes a predecessor's downloads: the library does not see those that had only begun.
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

// recover drops the mounts and leases of a predecessor and what they held, so that no pull
// builds on what a killed one left, and reads the records.
func (s *Store) recover(ctx context.Context) error {
	ctx = s.scope(ctx)
	err := mount.SetTempMountLocation(filepath.Join(s.dir, "mounts"))
	if err == nil {
		var failed []error
		failed, err = mount.CleanupTempMounts(unix.MNT_DETACH)
		err = errors.Join(append(failed, err)...)
	}
	if err != nil {
		return fmt.Errorf("unmount what was being unpacked or saved: %w", err)
	}
	left, err := s.leases.List(ctx)
	if err != nil {
		return fmt.Errorf("list leases: %w", err)
	}
	for _, l := range left {
		if err := s.leases.Delete(ctx, l); err != nil {
			return fmt.Errorf("drop lease %s: %w", l.ID, err)
		}
	}
	if _, err := s.db.GarbageCollect(ctx); err != nil {
		return fmt.Errorf("drop unfinished pulls: %w", err)
	}
	return s.readRecords(ctx)
}

func (s *Store) warnOfRegistries() {
	for _, problem := range CheckRegistries(s.settings().CertsDirs, s.settings().DockerConfig, s.settings().VerifierDir) {
		s.log.Warn("pulls that need this file will fail, or go without it", "error", problem)
	}
}

// Reconfigure puts the settings of pulls, and which images are pinned, into force from now on. The directories stay.
func (s *Store) Reconfigure(config Config) {
	config.waitWindow, config.CollectDelay, config.Observe, config.Logger = s.config.waitWindow, s.config.CollectDelay, s.config.Observe, s.config.Logger
	config.setDefaults()
	s.reloaded.Store(&config)
	s.warnOfRegistries()
}

func (s *Store) settings() *Config { return s.reloaded.Load() }

// begin counts work for which Close waits, or refuses it.
func (s *Store) begin() error {
	s.closing.Lock()
	defer s.closing.Unlock()
	if s.ctx.Err() != nil {
		return context.Cause(s.ctx)
	}
	s.work.Add(1)
	return nil
}

// Close ends pulls and the collection and closes the database. Containers' mounts stay.
func (s *Store) Close() error {
	s.closing.Lock()
	s.end(fmt.Errorf("the image store is closed: %w", errdefs.ErrUnavailable))
	s.closing.Unlock()
	s.work.Wait()
	_ = s.unmounted.Wait() // to close a descriptor of ours cannot fail
	if err := errors.Join(s.overlay.Close(), s.db.Close()); err != nil {
		return fmt.Errorf("close image store %s: %w", s.dir, err)
	}
	return nil
}

// scope names the metadata namespace and the log of containerd's packages.
func (s *Store) scope(ctx context.Context) context.Context {
	return log.WithLogger(namespaces.WithNamespace(ctx, "minicri"), s.libraryLog)
}

// libraryLog logs for debugging whatever containerd's packages log, without secrets: they return their errors, and warn
// of each mirror that does not answer.
func libraryLog(logger *slog.Logger, secrets *redact.Secrets) *log.Entry {
	library := logrus.New()
	library.SetOutput(io.Discard)
	library.AddHook(hiding{secrets})
	library.AddHook(logrusslog.NewHook(logger, &logrusslog.HookOptions{LevelMapper: func(logrus.Level) slog.Level { return slog.LevelDebug }}))
	library.SetLevel(logrus.DebugLevel)
	return logrus.NewEntry(library)
}

// hiding takes secrets out of an entry before the next hook logs it.
type hiding struct{ secrets *redact.Secrets }

func (hiding) Levels() []logrus.Level { return logrus.AllLevels }

func (h hiding) Fire(entry *logrus.Entry) error {
	entry.Message = h.secrets.Text(entry.Message)
	for key, value := range entry.Data {
		entry.Data[key] = h.secrets.Text(fmt.Sprint(value))
	}
	return nil
}

// Collect removes the blobs, unfinished downloads and snapshots that no record, lease or
// container holds. The store calls it by itself; it is exported for callers that cannot wait.
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
	err := s.checkFree(64<<10, "") // more than compareDisk writes: what it leaves at a failure stays until the next start
	if err == nil {
		err = s.compareDisk(ctx)
	}
	if err != nil { // a full disk, above all
		s.log.Warn("images are not compared with the disk yet: the next collection retries", "error", err)
		return nil
	}
	s.compared.Store(true)
	return s.Collect(ctx)
}

// compareDisk makes the next collection remove what a killed predecessor left on the disk but not in the database.
// The library compares the two only after a removal, so something is made and removed.
func (s *Store) compareDisk(ctx context.Context) error {
	const probe = "minicri: removed at once"
	// Each try has its own: the library keeps a name locked whose record the disk did not take, and for a day a blob
	// that a killed try found on the disk.
	own := fmt.Sprintf("%s %d", probe, time.Now().UnixNano())
	desc := ocispec.Descriptor{Digest: digest.FromString(own), Size: int64(len(own))}
	if err := content.WriteBlob(ctx, s.content, own, strings.NewReader(own), desc); err != nil {
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
		if s.collecting.Acquire(s.ctx, 1) != nil {
			return
		}
		defer s.collecting.Release(1)
		s.asked.Store(false)
		if err := s.Collect(s.ctx); err != nil && s.ctx.Err() == nil {
			s.log.Error("garbage collection of images failed: it is retried after the next removal", "error", err)
		}
	}()
}

// lease keeps what is made under the returned context until release. Then what is not recorded is collected.
func (s *Store) lease(ctx context.Context) (_ context.Context, release func(), err error) {
	created, err := s.leases.Create(ctx, leases.WithRandomID())
	if err != nil {
		return nil, nil, fmt.Errorf("make a lease: %w", err)
	}
	release = func() {
		if err := s.leases.Delete(context.WithoutCancel(ctx), created); err != nil {
			s.log.Error("a lease could not be deleted: its content stays until the next start", "lease", created.ID, "error", err)
		}
		s.collectSoon()
	}
	return leases.WithLease(ctx, created.ID), release, nil
}
