package image

import (
	"context"
	"fmt"
	"io"
	"strconv"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/minicri/minicri/internal/trace"
)

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
	end(err)
	if errdefs.IsFailedPrecondition(err) { // so the library calls bytes that are not those of the digest
		err = fmt.Errorf("wrong bytes: %v: %w", err, errdefs.ErrDataLoss) //nolint:errorlint
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

// Writer implements content.Ingester.
func (p *pulling) Writer(ctx context.Context, opts ...content.WriterOpt) (content.Writer, error) {
	return p.store.content.Writer(ctx, append(opts, func(o *content.WriterOpts) error {
		o.Ref += "-" + p.id
		return nil
	})...)
}

// Fetch implements remotes.Fetcher. The library goes on by itself where a connection
// breaks. Where else the descriptor says that the blob can be had is not looked at: it
// is an address of the image author's choice, and would be asked from within the
// node's network.
func (p *pulling) Fetch(ctx context.Context, desc ocispec.Descriptor) (io.ReadCloser, error) {
	if err := p.store.checkFree(desc.Size, ""); err != nil {
		return nil, err
	}
	desc.URLs = nil
	body, err := p.remote.Fetch(asBlob(ctx), desc)
	if err != nil {
		return nil, err
	}
	d := &download{ReadCloser: body, pull: p, desc: desc}
	ctx, d.stop = context.WithCancel(ctx)
	go d.watch(ctx)
	return d, nil
}

// download is a blob under way.
type download struct {
	io.ReadCloser
	pull  *pulling
	desc  ocispec.Descriptor
	at    int64
	bytes atomic.Int64 // in this window of watch
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

const (
	// waitRate is the slowest download, in bytes per second over waitWindow, that
	// other pulls of the same blob wait for.
	waitRate = 64 << 10
	// waitWindow is how long a download is measured before it is called slow.
	waitWindow = 10 * time.Second
)

// watch counts the download among the slow ones of its pull while it is below waitRate.
func (d *download) watch(ctx context.Context) {
	locks, slow := d.pull.locks, int32(0)
	defer func() { locks.slow.Add(-slow) }()
	tick := time.NewTicker(locks.window)
	defer tick.Stop()
	for {
		select {
		case <-ctx.Done():
			return
		case <-tick.C:
		}
		was := slow
		slow = 0
		if float64(d.bytes.Swap(0)) < waitRate*locks.window.Seconds() {
			slow = 1
		}
		locks.slow.Add(slow - was)
	}
}

// locks are a mutex per key, so that a blob is fetched and a layer unpacked by
// one pull while the others wait for its outcome.
type locks struct {
	mu   sync.Mutex // guards held
	held map[string]*hold
}

type hold struct {
	by   *pullLocks
	done chan struct{} // closed when the key is released
}

// pullLocks are locks as one pull uses them: a key that a slow pull holds is
// passed, and the work done twice. The stores take the outcome of whichever pull
// is first.
type pullLocks struct {
	all    *locks
	window time.Duration
	slow   atomic.Int32 // downloads of this pull that are slow
}

func (l *locks) forPull(window time.Duration) *pullLocks { return &pullLocks{all: l, window: window} }

// Lock returns when the key is held or passed, or with the error of ctx.
func (l *pullLocks) Lock(ctx context.Context, key string) error {
	for {
		l.all.mu.Lock()
		other := l.all.held[key]
		if other == nil {
			l.all.held[key] = &hold{by: l, done: make(chan struct{})}
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
	if mine := l.all.held[key]; mine != nil && mine.by == l {
		delete(l.all.held, key)
		close(mine.done)
	}
}

// kindOf names a blob in errors.
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
