package image

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/leases"
	"github.com/containerd/containerd/v2/core/metadata"
	"github.com/containerd/containerd/v2/core/snapshots"
	"github.com/containerd/containerd/v2/pkg/namespaces"
	"github.com/containerd/log"
	"golang.org/x/sync/errgroup"
	"golang.org/x/sync/semaphore"
)

// Config says where a Store lives and how it pulls. Zero values are replaced by
// the defaults named at each field.
type Config struct {
	// Root is the daemon's durable directory; the store uses Root/image.
	Root string
	// CertsDirs are searched in order for <host>/hosts.toml at each pull.
	CertsDirs []string
	// DockerConfig is a docker config.json with credentials for hosts that a
	// pull brings none for. Empty: none.
	DockerConfig string
	// VerifierDir holds executables that must all accept an image before it is
	// fetched. Empty: images are not verified.
	VerifierDir string
	// Pinned are references whose images are reported as pinned.
	Pinned []string
	// ProgressTimeout ends a pull whose registry sends no byte for so long.
	// Default 1 minute.
	ProgressTimeout time.Duration
	// MinRate ends a pull whose registry sends fewer bytes per second, on average
	// over ProgressTimeout. 0: no minimum.
	MinRate int64
	// VerifierTimeout is how long one verifier may take. Default 10 seconds.
	VerifierTimeout time.Duration
	// VolumesDir has a directory, named by its container, for the volumes that
	// images declare; they are measured with the container's writable layer.
	// Empty: none.
	VolumesDir string
	// MaxDownloads is how many blobs one pull fetches at once. Default 3.
	MaxDownloads int
	// KeepLayers keeps the layers of a pull or an import as they came, after they are
	// unpacked.
	KeepLayers bool
	// CollectDelay is how long after a removal garbage is collected. Default 2 seconds.
	CollectDelay time.Duration
	// Observe is called when a pull ends. Nil: not.
	Observe func(PullResult)
	// Logger receives what has no caller to return it to. Default slog.Default.
	Logger *slog.Logger

	waitWindow time.Duration // shorter in tests
}

// PullResult is how a pull ended.
type PullResult struct {
	Reference string
	// Size is that of the image, 0 if there is none.
	Size  int64
	Took  time.Duration
	Bytes int64 // that came from the registry
	Err   error
}

// Store is the node's images. Its methods may be called from any goroutine.
type Store struct {
	config Config
	// reloaded are the settings of pulls, see Reconfigure.
	reloaded atomic.Pointer[Config]
	dir      string
	log      *slog.Logger
	// libraryLog is log for containerd's packages.
	libraryLog *log.Entry

	engine    *engine
	images    images.Store
	leases    leases.Manager
	snapshots snapshots.Snapshotter

	catalog   *catalog
	pulls     *pulls
	locks     *keyLock
	usage     sync.Map // the last measurement of each container's layer, by key
	room      *room
	zstd      *semaphore.Weighted // places for decoders, of all pulls and imports together
	collector *collector
	// unmounted ends file systems that are mounted nowhere any more.
	unmounted errgroup.Group
}

// Open opens or makes the store below config.Root. What a killed predecessor
// left half done is forgotten now and deleted in the background. A store that another process
// holds is an ErrUnavailable.
func Open(ctx context.Context, config Config) (*Store, error) {
	config.setDefaults()
	dir := filepath.Join(config.Root, "image")
	if err := os.MkdirAll(dir, 0o700); err != nil {
		return nil, fmt.Errorf("open image store: %w", err)
	}
	if err := os.MkdirAll(filepath.Join(dir, emptyDir), 0o755); err != nil {
		return nil, fmt.Errorf("open image store %s: %w", dir, err)
	}
	engine, err := openEngine(ctx, dir)
	if err != nil {
		return nil, fmt.Errorf("open image store %s: %w", dir, err)
	}
	s := newStore(config, dir, engine)
	if err := s.recover(ctx); err != nil {
		return nil, errors.Join(fmt.Errorf("open image store %s: %w", dir, err), engine.close())
	}
	s.warnOfRegistries()
	s.collector.start()
	return s, nil
}

// warnOfRegistries says what pulls will fail for, or not use, before they do.
func (s *Store) warnOfRegistries() {
	for _, problem := range CheckRegistries(s.settings().CertsDirs, s.settings().DockerConfig) {
		s.log.Warn("pulls that need this file will fail, or go without it", "error", problem)
	}
}

func (c *Config) setDefaults() {
	if c.ProgressTimeout <= 0 {
		c.ProgressTimeout = time.Minute
	}
	if c.VerifierTimeout <= 0 {
		c.VerifierTimeout = 10 * time.Second
	}
	if c.waitWindow <= 0 {
		c.waitWindow = waitWindow
	}
	if c.MaxDownloads <= 0 {
		c.MaxDownloads = 3
	}
	if c.CollectDelay <= 0 {
		c.CollectDelay = 2 * time.Second
	}
	if c.Observe == nil {
		c.Observe = func(PullResult) {}
	}
	if c.Logger == nil {
		c.Logger = slog.Default()
	}
}

// Reconfigure puts other settings into force, for pulls that begin from now on:
// where registries and their credentials are configured, verifiers, limits, and
// which images are pinned. The directories stay.
func (s *Store) Reconfigure(config Config) {
	config.waitWindow, config.CollectDelay, config.Observe, config.Logger = s.config.waitWindow, s.config.CollectDelay, s.config.Observe, s.config.Logger
	config.setDefaults()
	s.reloaded.Store(&config)
	s.catalog.pin(config.Pinned)
	s.warnOfRegistries()
}

// settings are those of pulls that are in force.
func (s *Store) settings() *Config { return s.reloaded.Load() }

func newStore(config Config, dir string, engine *engine) *Store {
	s := &Store{
		config:     config,
		dir:        dir,
		log:        config.Logger,
		libraryLog: libraryLog(config.Logger),
		engine:     engine,
		images:     metadata.NewImageStore(engine.db),
		leases:     metadata.NewLeaseManager(engine.db),
		snapshots:  engine.db.Snapshotter(snapshotterKey),
		catalog:    newCatalog(config.Pinned),
		pulls:      newPulls(),
		locks:      newKeyLock(),
		room:       &room{dir: dir},
		zstd:       semaphore.NewWeighted(maxZstd),
	}
	s.unmounted.SetLimit(closesAtOnce)
	s.reloaded.Store(&config)
	s.collector = newCollector(config.CollectDelay, s.Collect, s.log)
	return s
}

// recover drops the leases of a predecessor, whose pulls ended with it, with what
// they held, and reads the records. It is complete before the first pull, which
// therefore builds on nothing that a killed one left.
func (s *Store) recover(ctx context.Context) error {
	ctx = s.scope(ctx)
	if err := s.dropMounts(); err != nil {
		return fmt.Errorf("unmount what was being unpacked or saved: %w", err)
	}
	if err := s.dropLeases(ctx); err != nil {
		return err
	}
	if err := s.engine.mark(ctx); err != nil {
		return fmt.Errorf("drop unfinished pulls: %w", err)
	}
	return s.loadCatalog(ctx)
}

// Close ends running pulls and the collection and closes the database. Mounts of
// containers stay.
func (s *Store) Close() error {
	s.pulls.close()
	s.collector.stop()
	_ = s.unmounted.Wait() // to close a descriptor of ours cannot fail
	if err := s.engine.close(); err != nil {
		return fmt.Errorf("close image store %s: %w", s.dir, err)
	}
	return nil
}

// Dir is the directory that holds all of the store.
func (s *Store) Dir() string { return s.dir }

// namespace is the one metadata namespace that the store uses.
const namespace = "minicri"

// scope names the metadata namespace, without which the database refuses calls,
// and where the libraries log to.
func (s *Store) scope(ctx context.Context) context.Context {
	return log.WithLogger(namespaces.WithNamespace(ctx, namespace), s.libraryLog)
}
