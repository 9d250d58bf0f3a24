package image

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/content"
	"github.com/containerd/containerd/v2/core/images"
	"github.com/containerd/containerd/v2/core/remotes"
	remoteerrors "github.com/containerd/containerd/v2/core/remotes/errors"
	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
)

const (
	// fetchTries is how often a blob is tried without getting any further.
	fetchTries = 5
	// firstPause grows twofold with each such try.
	firstPause = 100 * time.Millisecond
)

// fetcher brings blobs from a registry into the content store.
type fetcher struct {
	content content.Store
	remote  remotes.Fetcher
	report  func(Progress)
}

// handle is the handler of images.Dispatch: it fetches one blob.
func (f fetcher) handle(ctx context.Context, desc ocispec.Descriptor) ([]ocispec.Descriptor, error) {
	if err := f.blob(ctx, desc); err != nil {
		return nil, fmt.Errorf("fetch %s %s: %w", kindOf(desc), desc.Digest, err)
	}
	return nil, nil
}

// blob fetches until the blob is there, going on where a broken connection
// ended. Each try that gets further gives it new tries.
func (f fetcher) blob(ctx context.Context, desc ocispec.Descriptor) error {
	ref := remotes.MakeRefKey(ctx, desc)
	for try := 1; ; try++ {
		before := f.offset(ctx, ref)
		err := remotes.Fetch(ctx, f.content, f.counted(before), desc)
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
		if err := pause(ctx, firstPause<<(try-1)); err != nil {
			return err
		}
	}
}

// dropWrong forgets bytes that are not those of the digest: kept, they would
// make every later pull fail as well.
func (f fetcher) dropWrong(ctx context.Context, ref string, err error) error {
	return errors.Join(fmt.Errorf("wrong bytes: %w: %w", err, errdefs.ErrDataLoss), f.content.Abort(ctx, ref))
}

func (f fetcher) offset(ctx context.Context, ref string) int64 {
	status, err := f.content.Status(ctx, ref)
	if err != nil {
		return 0
	}
	return status.Offset
}

// counted wraps the remote so that its bodies report.
func (f fetcher) counted(offset int64) remotes.Fetcher {
	return remotes.FetcherFunc(func(ctx context.Context, desc ocispec.Descriptor) (io.ReadCloser, error) {
		rc, err := f.remote.Fetch(ctx, desc)
		if err != nil {
			return nil, err
		}
		at := Progress{Digest: desc.Digest.String(), Stage: StageDownload, Done: offset, Total: desc.Size}
		return &countedBody{ReadCloser: rc, at: at, report: f.report}, nil
	})
}

// worthRetrying tells a link or a server that may recover from an answer that
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
