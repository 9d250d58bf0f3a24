package image

import (
	"context"
	"errors"
	"fmt"
	"net/http"
	"path/filepath"
	"sync"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/minicri/minicri/test/harness"
)

// sharing pushes images that have most of their layers in common.
func sharing(t *testing.T, registry *testRegistry, count int) (references, layers []string) {
	common := []v1.Layer{layerOf(t, noise("base", 1<<20, 1)), layerOf(t, noise("lib", 1<<19, 2)), layerOf(t, file("etc/x", "x"))}
	for _, l := range common {
		layers = append(layers, digestOf(t, l))
	}
	for i := range count {
		own := layerOf(t, file("app", fmt.Sprint("app ", i)))
		layers = append(layers, digestOf(t, own))
		img := imageOf(t, v1.Config{}, append(append([]v1.Layer{}, common...), own)...)
		references = append(references, registry.push(t, fmt.Sprintf("share/%d:1", i), img))
	}
	return references, layers
}

// slowly makes blobs take long enough for pulls to meet.
func slowly(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
	time.Sleep(20 * time.Millisecond)
	return false
}

func TestTwentyPullsFetchEachLayerOnce(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	references, layers := sharing(t, registry, 5)
	registry.breakWith(onBlob("", slowly))
	var work sync.WaitGroup
	for i := range 20 {
		work.Go(func() {
			_, err := s.Pull(t.Context(), references[i%5], Auth{}, nil)
			harness.Same(t, "a pull's error", err, nil)
		})
	}
	work.Wait()
	for _, layer := range layers {
		harness.Same(t, "requests for layer "+layer, len(registry.blobGets(layer)), 1)
	}
	checkLeft(t, s, leftovers{blobs: 10, snapshots: 8, records: 5})
	for i, image := range s.List() {
		must(t, s.Prepare(t.Context(), fmt.Sprint(i), image.ID, PrepareOptions{}))
	}
}

// TestOneCancelledPullDoesNotEndOthers cancels the one pull that fetches the
// shared layer while equal pulls and pulls of other images wait for it.
func TestOneCancelledPullDoesNotEndOthers(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	references, layers := sharing(t, registry, 3)
	reached, heal := make(chan struct{}, 20), make(chan struct{})
	registry.breakWith(onBlob(layers[0], func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		reached <- struct{}{}
		select {
		case <-heal:
		case <-r.Context().Done():
		}
		return false
	}))
	ctx, cancel := context.WithCancel(t.Context())
	var first, others sync.WaitGroup
	first.Go(func() {
		_, err := s.Pull(ctx, references[0], Auth{}, nil)
		harness.Want(t, errors.Is(err, context.Canceled), "the cancelled pull: %v", err)
	})
	<-reached
	for i := range 6 {
		others.Go(func() {
			_, err := s.Pull(t.Context(), references[i%3], Auth{}, nil)
			harness.Same(t, "a pull's error", err, nil)
		})
	}
	for len(registry.seen(func(r seenRequest) bool { return r.method == http.MethodHead })) < 7 {
		time.Sleep(time.Millisecond)
	}
	cancel()
	first.Wait()
	close(heal)
	others.Wait()
	checkLeft(t, s, leftovers{blobs: 6, snapshots: 6, records: 3})
}

func TestCloseEndsRunningPulls(t *testing.T) {
	registry := newTestRegistry(t)
	reference := registry.push(t, "close:1", smallImage(t))
	reached := make(chan struct{}, 1)
	registry.breakWith(onBlob("", func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		select {
		case reached <- struct{}{}:
		default:
		}
		<-r.Context().Done()
		return true
	}))
	s, err := Open(t.Context(), Config{Root: filepath.Join(t.TempDir(), "root")})
	must(t, err)
	failed := make(chan error)
	go func() {
		_, err := s.Pull(t.Context(), reference, Auth{}, nil)
		failed <- err
	}()
	<-reached
	must(t, s.Close())
	harness.Want(t, <-failed != nil, "the pull succeeded on a closed store")
	_, err = s.Pull(t.Context(), reference, Auth{}, nil)
	harness.Want(t, err != nil, "a closed store pulls")
}
