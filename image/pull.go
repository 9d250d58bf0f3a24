package image

import (
	"context"
	"crypto/rand"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	"github.com/containerd/log"
	"github.com/containerd/platforms"
	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/trace"
)

// Stage says what is being done with a blob.
type Stage string

const (
	StageDownload Stage = "downloading" // Done of Total bytes have come from the registry
	StageUnpack   Stage = "unpacking"   // Done of Total compressed bytes have been unpacked
	StageDone     Stage = "done"        // the blob is on the node; Done equals Total
)

// Progress is how far a pull has got with one blob. Reports of one blob are in order.
type Progress struct {
	Digest string // sha256:<hex>
	Stage  Stage
	Done   int64 // bytes
	Total  int64 // bytes
}

// Pull makes the image that reference names complete and durable on this node. Pulls at the same time fetch each blob
// and unpack each layer once. progress may be nil; calls of it do not overlap, and end before Pull returns.
//
// Errors are ErrInvalidArgument for the reference or credentials, ErrNotFound,
// ErrUnauthenticated, ErrPermissionDenied and ErrResourceExhausted for the registry's
// answer, ErrRegistryUnavailable without one, ErrDataLoss and ErrVerification.
func (s *Store) Pull(ctx context.Context, reference string, auth Auth, progress func(Progress)) (Image, error) {
	return s.PullFor(ctx, reference, "", auth, progress)
}

// PullFor is Pull for another platform, os/arch or os/arch/variant. It records that
// platform's manifest alone, not the index.
func (s *Store) PullFor(ctx context.Context, reference, platform string, auth Auth, progress func(Progress)) (Image, error) {
	ref, err := ParseReference(reference)
	if err != nil {
		return Image{}, err
	}
	p := &pulling{
		store: s, ref: ref, secrets: &redact.Secrets{}, locks: s.locks.forPull(s.config.waitWindow), progress: progress,
		last: map[string]reported{}, blobs: map[string]Progress{}, began: time.Now(),
	}
	if p.platform, err = platformNamed(platform); err != nil {
		return Image{}, err
	}
	if err := s.begin(); err != nil {
		return Image{}, fmt.Errorf("pull %s: %w", ref, err)
	}
	defer s.work.Done()
	ctx, cancel := context.WithCancelCause(log.WithLogger(s.scope(ctx), libraryLog(s.log, p.secrets)))
	defer cancel(nil)
	defer context.AfterFunc(s.ctx, func() { cancel(context.Cause(s.ctx)) })()
	defer s.underWay.enter(p)()
	p.access, err = s.access(ref, auth, p.secrets)
	var image Image
	if err == nil {
		image, err = p.run(ctx, platform)
	}
	if err != nil {
		known := registryError(ctx, err, p.secrets)
		err = pullError{error: known, ref: ref.String(), cure: p.cureOf(err, known), secrets: p.secrets}
	}
	p.reporting.Lock()
	p.progress = nil // a fetch that the library left behind may still report
	p.reporting.Unlock()
	s.config.Observe(time.Since(p.began), p.fetched.Load(), err)
	return image, err
}

type pulling struct {
	store    *Store
	ref      reference.Named
	access   *credentials
	secrets  *redact.Secrets
	platform platforms.MatchComparer
	remote   remotes.Fetcher
	locks    *pullLocks
	id       string       // in the names of its downloads: other pulls may fetch the same blob
	fetched  atomic.Int64 // bytes
	began    time.Time

	reporting sync.Mutex // guards progress and last; held during progress, so reports stay in order
	progress  func(Progress)
	last      map[string]reported // by digest
	mu        sync.Mutex          // guards blobs
	blobs     map[string]Progress // by digest
}

type reported struct {
	stage Stage
	time  time.Time
}

const reportEvery = 100 * time.Millisecond // for a stage of a blob

func (p *pulling) report(desc ocispec.Descriptor, stage Stage, done int64) {
	digest, now := desc.Digest.String(), time.Now()
	reached := Progress{Digest: digest, Stage: stage, Done: done, Total: desc.Size}
	p.reporting.Lock()
	defer p.reporting.Unlock()
	p.mu.Lock()
	p.blobs[digest] = reached
	p.mu.Unlock()
	last := p.last[digest]
	again := last.stage == stage && (stage == StageDone || done < desc.Size && now.Sub(last.time) < reportEvery)
	if p.progress == nil || again {
		return
	}
	p.last[digest] = reported{stage: stage, time: now}
	p.progress(reached)
}

// run does the work, in order. platform is "" for the node's.
func (p *pulling) run(ctx context.Context, platform string) (Image, error) {
	s := p.store
	if pinned, ok := p.ref.(reference.Digested); ok {
		if err := checkAlgorithm(pinned.Digest()); err != nil {
			return Image{}, err
		}
	}
	ctx, release, err := s.lease(ctx)
	if err != nil {
		return Image{}, err
	}
	defer release()
	resolver := s.resolver(ctx, p.access)
	target, err := p.resolve(ctx, resolver)
	if err != nil {
		return Image{}, err
	}
	if err := s.verify(ctx, p.ref, target); err != nil {
		return Image{}, err
	}
	if p.remote, err = resolver.Fetcher(ctx, p.ref.String()); err != nil {
		return Image{}, err
	}
	p.id = rand.Text()
	way := route{platform: p.platform, wanted: platform, get: p.get, locks: p.locks, report: p.report}
	if platform != "" {
		if target, err = s.manifestOf(ctx, target, way); err != nil {
			return Image{}, err
		}
	}
	manifest, err := s.unpackTree(ctx, target, way)
	if err != nil {
		return Image{}, err
	}
	image, err := s.fromContent(ctx, target, manifest)
	if err != nil {
		return Image{}, err
	}
	image.names = []string{p.ref.String(), p.ref.Name() + "@" + target.Digest.String()}
	if err := s.record(ctx, image); err != nil {
		return Image{}, err
	}
	return s.Get(image.ID)
}

func (p *pulling) resolve(ctx context.Context, resolver remotes.Resolver) (ocispec.Descriptor, error) {
	_, target, err := resolver.Resolve(ctx, p.ref.String())
	if _, isStatus := errors.AsType[remoteerrors.ErrUnexpectedStatus](err); errdefs.IsNotFound(err) && !isStatus {
		return target, fmt.Errorf("%w in registry %s%s", errAbsent, reference.Domain(p.ref), p.access.answers.said())
	}
	if err != nil {
		return target, fmt.Errorf("resolve: %w", err)
	}
	if !images.IsIndexType(target.MediaType) && !images.IsManifestType(target.MediaType) {
		return target, fmt.Errorf("resolve: %s is of type %q, not an image: %w", target.Digest, cut(p.secrets.Text(target.MediaType), 100), errdefs.ErrInvalidArgument)
	}
	return target, nil
}

// get is the handler of images.Dispatch: it fetches one blob.
func (p *pulling) get(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	if err := checkDescriptor(desc); err != nil {
		return nil, err
	}
	ctx, end := trace.Begin(ctx, "image/"+kindOf(desc), "digest", desc.Digest.String(), "size", strconv.FormatInt(desc.Size, 10))
	err := remotes.Fetch(ctx, p, p, desc)
	if errdefs.IsAlreadyExists(err) {
		err = nil
	}
	if err != nil {
		end(errors.New(p.secrets.Text(err.Error())))
	} else {
		end(nil)
	}
	if errdefs.IsFailedPrecondition(err) { // by which the library means bytes with another digest
		err = fmt.Errorf("wrong bytes: %v: %w", err, errdefs.ErrDataLoss) //nolint:errorlint
	}
	if errdefs.IsNotFound(err) && images.IsNonDistributable(desc.MediaType) {
		return nil, fmt.Errorf("fetch foreign layer %s: %w: %w", desc.Digest, errForeign, err)
	}
	if err != nil {
		return nil, fmt.Errorf("fetch %s %s: %w", kindOf(desc), desc.Digest, err)
	}
	if images.IsLayerType(desc.MediaType) {
		p.report(desc, StageDownload, desc.Size)
	} else {
		p.report(desc, StageDone, desc.Size)
	}
	return nil, nil
}

// Writer implements content.Ingester. The library fetches no digest that its database knows. It is not told that of a
// document whose file is damaged, so a pull repairs it. Layers are digested when they are unpacked.
func (p *pulling) Writer(ctx context.Context, opts ...content.WriterOpt) (content.Writer, error) {
	return p.store.content.Writer(ctx, append(opts, func(o *content.WriterOpts) error {
		o.Ref += "-" + p.id
		if images.IsLayerType(o.Desc.MediaType) {
			return nil
		}
		path := filepath.Join(p.store.dir, "content/blobs/sha256", o.Desc.Digest.Encoded())
		data, err := os.ReadFile(path)
		if err == nil && o.Desc.Digest.Algorithm().FromBytes(data) != o.Desc.Digest || errors.Is(err, os.ErrNotExist) || errors.Is(err, syscall.EIO) {
			o.Desc.Digest, err = "", os.RemoveAll(path)
		}
		return err
	})...)
}

// Fetch implements remotes.Fetcher. The library goes on where a connection breaks. The descriptor's URLs are not
// asked: they are the image author's choice, and may be services of the node's network.
func (p *pulling) Fetch(ctx context.Context, desc ocispec.Descriptor) (io.ReadCloser, error) {
	if err := p.store.checkFree(desc.Size, ""); err != nil {
		return nil, err
	}
	desc.URLs = nil
	body, err := p.remote.Fetch(context.WithValue(ctx, blobKey{}, true), desc)
	if err != nil {
		return nil, err
	}
	d := &download{ReadCloser: body, pull: p, desc: desc}
	ctx, d.stop = context.WithCancel(ctx)
	go p.locks.watch(ctx, &d.bytes, func() {})
	return d, nil
}

type download struct {
	io.ReadCloser
	pull  *pulling
	desc  ocispec.Descriptor
	at    int64
	bytes atomic.Int64 // for a watch
	stop  context.CancelFunc
}

func (d *download) Read(p []byte) (int, error) {
	n, err := d.ReadCloser.Read(p)
	if err != nil {
		d.stop()
	}
	d.at += int64(n)
	d.bytes.Add(int64(n))
	d.pull.fetched.Add(int64(n))
	d.pull.report(d.desc, StageDownload, d.at)
	return n, err
}

func (d *download) Close() error {
	d.stop()
	return d.ReadCloser.Close()
}

// Other pulls of a blob or a layer do not wait for a download, or for an unpack, below waitRate: packed bytes per second.
const (
	waitRate   = 64 << 10
	waitWindow = 10 * time.Second // how long it is measured
)

// watch counts a work of the pull as a slow one while it moves less than waitRate, and calls slowed each time.
func (l *pullLocks) watch(ctx context.Context, moved *atomic.Int64, slowed func()) {
	slow := int32(0)
	defer func() { l.slow.Add(-slow) }()
	tick := time.NewTicker(l.window)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		was := slow
		slow = 0
		if float64(moved.Swap(0)) < waitRate*l.window.Seconds() {
			slow = 1
			slowed()
		}
		l.slow.Add(slow - was)
	}
}

// locks are a mutex per key: one pull fetches a blob or unpacks a layer, others wait.
type locks struct {
	mu    sync.Mutex // guards byKey
	byKey map[string]*lock
}

type lock struct {
	by   *pullLocks
	done chan struct{} // closed when the key is released
}

// pullLocks are locks as one pull uses them. A key that a slow pull holds is passed and
// the work done twice; the stores take the first outcome.
type pullLocks struct {
	all    *locks
	window time.Duration
	slow   atomic.Int32 // downloads and unpacks of this pull that are slow
}

func (l *locks) forPull(window time.Duration) *pullLocks { return &pullLocks{all: l, window: window} }

// Lock returns when the key is held or passed, or with the error of ctx.
func (l *pullLocks) Lock(ctx context.Context, key string) error {
	for {
		l.all.mu.Lock()
		other := l.all.byKey[key]
		if other == nil {
			l.all.byKey[key] = &lock{by: l, done: make(chan struct{})}
		}
		l.all.mu.Unlock()
		if other == nil || other.by != l && other.by.slow.Load() > 0 {
			return nil
		}
		select {
		case <-other.done:
		case <-time.After(l.window / 10):
		case <-ctx.Done():
			return context.Cause(ctx)
		}
	}
}

// Unlock releases the key, unless it was passed.
func (l *pullLocks) Unlock(key string) {
	l.all.mu.Lock()
	defer l.all.mu.Unlock()
	if mine := l.all.byKey[key]; mine != nil && mine.by == l {
		delete(l.all.byKey, key)
		close(mine.done)
	}
}

func kindOf(desc ocispec.Descriptor) string {
	switch {
	case images.IsIndexType(desc.MediaType):
		return "index"
	case images.IsManifestType(desc.MediaType):
		return "manifest"
	case images.IsLayerType(desc.MediaType):
		return "layer"
	case images.IsConfigType(desc.MediaType):
		return "configuration"
	}
	return "blob"
}
