package image

import (
	"context"
	"errors"
	"testing"

	"github.com/distribution/reference"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/minicri/minicri/test/harness"
)

// Nobody waits for a disk beyond the own deadline, and images are listed meanwhile.
//
// attack: denial of service: the disk of the images hangs while an image is recorded or a snapshot is made
// held: other calls end with their deadlines; images are still listed
func TestHangingDisk(t *testing.T) {
	s := openStore(t)
	harness.Check(t, errors.Join(s.changing.Acquire(t.Context(), 1), s.overlay.making.Acquire(t.Context(), 1)))
	left := errors.New("the caller has left")
	ctx, cancel := context.WithCancelCause(t.Context())
	cancel(left)
	_, prepared := s.overlay.Prepare(ctx, "key", "")
	_, viewed := s.overlay.View(ctx, "key", "")
	for name, err := range harness.Sorted(map[string]error{
		"a record": s.record(ctx), "a snapshot": prepared, "a view": viewed, "a sweep": s.overlay.sweep(ctx),
	}) {
		harness.Want(t, errors.Is(err, left), "%s: %v", name, err)
	}
	harness.Same(t, "images", len(s.List()), 0)
	s.changing.Release(1)
	s.overlay.making.Release(1)
	harness.Check(t, s.record(ctx)) // the undo of a caller that has left still records

	reached, goOn := make(chan struct{}), make(chan struct{})
	ref, err := reference.ParseNormalizedNamed("app")
	harness.Check(t, err)
	p := &pulling{ref: ref, last: map[string]reported{}, blobs: map[string]Progress{}}
	p.progress = func(Progress) { close(reached); <-goOn } // a client that does not read
	defer s.underWay.enter(p)()
	go p.report(ocispec.Descriptor{Size: 1}, StageDownload, 0)
	<-reached
	harness.Same(t, "pulls under way", len(s.PullsUnderWay()), 1)
	close(goOn)
}
