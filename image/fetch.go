package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"strconv"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/minicri/minicri/internal/trace"
)

const (
	// fetchTries is how often a blob is tried without getting any further.
	fetchTries = 5
	// firstRetry grows twofold with each such try.
	firstRetry = 100 * time.Millisecond
	// copyBuffer is what one blob is copied with, in bytes.
	copyBuffer = 64 << 10
)

// fetcher brings blobs from a registry into the content store.
type fetcher struct {
	content content.Store
	remote  remotes.Fetcher
	report  func(Progress)
	// pull sets the downloads of this pull apart from those of others that did
	// not wait for it.
	pull  string
	meter *meter
	// fetched counts the bytes that have come.
	fetched *atomic.Int64
	// checkFree refuses a blob that does not fit, before it is asked for.
	checkFree func(needed int64, what string) error
}

// handle is the handler of images.Dispatch: it fetches one blob.
func (f fetcher) handle(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	if err := checkDescriptor(desc); err != nil {
		return nil, err
	}
	ctx, end := trace.Begin(ctx, "image/"+kindOf(desc), "digest", desc.Digest.String(), "size", strconv.FormatInt(desc.Size, 10))
	err := f.blob(ctx, desc)
	end(err)
	if err != nil {
		return nil, fmt.Errorf("fetch %s %s: %w", kindOf(desc), desc.Digest, err)
	}
	return nil, nil
}

// blob fetches until the blob is there, continuing where a broken connection
// ended. Each try that gets further gives it new tries.
func (f fetcher) blob(ctx context.Context, desc ocispec.Descriptor) error {
	ref := remotes.MakeRefKey(ctx, desc) + "-" + f.pull
	for try := 1; ; try++ {
		before := f.offset(ctx, ref)
		err := f.once(ctx, ref, desc)
		if err == nil || errdefs.IsAlreadyExists(err) {
			f.report(Progress{Digest: desc.Digest.String(), Stage: StageDownload, Done: desc.Size, Total: desc.Size})
			return nil
		}
		if errdefs.IsFailedPrecondition(err) {
			return f.dropWrong(ctx, ref, err)
		}
		if f.offset(ctx, ref) > before {
			try = 1
		}
		if try == fetchTries || !worthRetrying(err) {
			return err
		}
		if err := pause(ctx, firstRetry<<(try-1)); err != nil {
			return err
		}
	}
}

// dropWrong forgets bytes that are not those of the digest: kept, they would
// make every later pull fail as well.
func (f fetcher) dropWrong(ctx context.Context, ref string, err error) error {
	// Not %w: the content store calls it a failed precondition.
	return errors.Join(fmt.Errorf("wrong bytes: %v: %w", err, errdefs.ErrDataLoss), f.content.Abort(ctx, ref)) //nolint:errorlint
}

func (f fetcher) offset(ctx context.Context, ref string) int64 {
	status, err := f.content.Status(ctx, ref)
	if err != nil {
		return 0
	}
	return status.Offset
}

// once fetches what is missing of a blob and commits it under its digest, which
// checks it. remotes.Fetch does the same with a buffer of 1 MiB for each blob:
// most of the memory of a pull.
func (f fetcher) once(ctx context.Context, ref string, desc ocispec.Descriptor) error {
	w, err := content.OpenWriter(ctx, f.content, content.WithRef(ref), content.WithDescriptor(desc))
	if err != nil {
		return err
	}
	defer w.Close()
	status, err := w.Status()
	if err != nil {
		return err
	}
	if status.Offset < desc.Size {
		if err := f.checkFree(desc.Size-status.Offset, ""); err != nil {
			return err
		}
		if err := f.copyFrom(ctx, w, desc, status.Offset); err != nil {
			return err
		}
	}
	return w.Commit(ctx, desc.Size, desc.Digest)
}

// copyFrom adds the bytes from offset on. Of bytes past the end one is enough
// for the commit to refuse. Where else the descriptor says that the blob can be
// had is not looked at: it is an address of the image author's choice, and would
// be asked from within the node's network.
func (f fetcher) copyFrom(ctx context.Context, w io.Writer, desc ocispec.Descriptor, offset int64) error {
	add, end := f.meter.start()
	defer end()
	desc.URLs = nil
	rc, err := f.remote.Fetch(asBlob(ctx), desc)
	if err != nil {
		return err
	}
	defer rc.Close()
	if offset > 0 {
		if _, err := rc.(io.Seeker).Seek(offset, io.SeekStart); err != nil {
			return err
		}
	}
	body := &countedReader{Reader: io.LimitReader(rc, desc.Size-offset+1), at: offset, report: func(at int64, n int) {
		add(n)
		f.fetched.Add(int64(n))
		f.report(Progress{Digest: desc.Digest.String(), Stage: StageDownload, Done: at, Total: desc.Size})
	}}
	if _, err := io.CopyBuffer(w, body, make([]byte, copyBuffer)); err != nil {
		return err
	}
	if body.at < desc.Size {
		return fmt.Errorf("%d of %d bytes: %w", body.at, desc.Size, io.ErrUnexpectedEOF)
	}
	return nil
}

// worthRetrying reports whether a link or a server may recover; another answer
// will stay the same. A stalled server has had its time.
func worthRetrying(err error) bool {
	if _, stalled := errors.AsType[stalledError](err); stalled {
		return false
	}
	if status, ok := errors.AsType[remoteerrors.ErrUnexpectedStatus](err); ok {
		return status.StatusCode >= 500 || status.StatusCode == 429
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return false
	}
	_, network := errors.AsType[*net.OpError](err)
	return network || errors.Is(err, io.ErrUnexpectedEOF) || errors.Is(err, io.EOF) || errors.Is(err, syscall.ECONNRESET)
}

func pause(ctx context.Context, d time.Duration) error {
	select {
	case <-time.After(d):
		return nil
	case <-ctx.Done():
		return context.Cause(ctx)
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
