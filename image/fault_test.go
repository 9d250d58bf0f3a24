package image

import (
	"bytes"
	"context"
	"errors"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"

	"github.com/minicri/minicri/test/harness"
)

// bigImage has one layer that does not compress, of 2 MiB.
func bigImage(t *testing.T) (img v1.Image, layer string) {
	l := layerOf(t, noise("big", 2<<20, 7))
	return imageOf(t, v1.Config{}, l), digestOf(t, l)
}

// cutAfter sends half of what is asked for, times times, and then resets the connection.
func cutAfter(times int32) faultFunc {
	var left atomic.Int32
	left.Store(times)
	return func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		if left.Add(-1) < 0 {
			return false
		}
		answer := httptest.NewRecorder()
		origin.ServeHTTP(answer, r)
		for key, values := range answer.Header() {
			w.Header()[key] = values
		}
		w.WriteHeader(answer.Code)
		_, _ = w.Write(answer.Body.Bytes()[:answer.Body.Len()/2])
		w.(http.Flusher).Flush()
		if conn, _, err := w.(http.Hijacker).Hijack(); err == nil {
			_ = conn.(*net.TCPConn).SetLinger(0)
			_ = conn.Close()
		}
		panic(http.ErrAbortHandler)
	}
}

func TestBrokenDownloadIsResumedByRange(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img, layer := bigImage(t)
	reference := registry.push(t, "cut:1", img)
	registry.breakWith(onBlob(layer, cutAfter(7)))
	pull(t, s, reference)
	gets := registry.blobGets(layer)
	harness.Want(t, len(gets) == 8, "%d requests, want 8", len(gets))
	for _, get := range gets[1:] {
		harness.Want(t, strings.HasPrefix(get.byteRange, "bytes=") && get.byteRange != "bytes=0-",
			"request after a cut has range %q", get.byteRange)
	}
}

func TestStalledRegistryEndsThePull(t *testing.T) {
	s, registry := openStore(t, func(c *Config) { c.ProgressTimeout = time.Second }), newTestRegistry(t)
	img, layer := bigImage(t)
	reference := registry.push(t, "stall:1", img)
	registry.breakWith(onBlob(layer, func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		_, _ = w.Write(wholeBody(origin, r)[:1000])
		w.(http.Flusher).Flush()
		<-r.Context().Done()
		return true
	}))
	began := time.Now()
	_, err := s.Pull(t.Context(), reference, Auth{}, nil)
	took := time.Since(began)
	harness.Want(t, took <= time.Minute, "the pull took %s", took)
	harness.Want(t, errors.Is(err, ErrRegistryUnavailable) && strings.Contains(err.Error(), layer) &&
		strings.Contains(err.Error(), "sent nothing for 1s"), "error: %v", err)
	checkLeft(t, s, leftovers{})
}

func TestWrongBytesAreRefusedByNameAndForgotten(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img, layer := bigImage(t)
	reference := registry.push(t, "wrong:1", img)
	manifest, config := digestOf(t, img), idOf(t, img)
	flip := func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		body := wholeBody(origin, r)
		body[len(body)/2] ^= 1
		_, _ = w.Write(body)
		return true
	}
	for kind, digest := range map[string]string{"layer": layer, "configuration": config} {
		registry.breakWith(onBlob(digest, flip))
		checkRefused(t, s, reference, Auth{}, errdefs.IsDataLoss, kind+" "+digest)
		collected(t, s)
	}
	registry.breakWith(func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/manifests/") && flip(w, r, origin)
	})
	checkRefused(t, s, registry.host()+"/wrong@"+manifest, Auth{}, errdefs.IsDataLoss, "manifest "+manifest)
	registry.breakWith(nil)
	pull(t, s, reference)
}

// TestPullRepairsADamagedImage: the database still knows a document whose file is gone or wrong.
func TestPullRepairsADamagedImage(t *testing.T) {
	registry := newTestRegistry(t)
	img := imageOf(t, v1.Config{User: "7"}, layerOf(t, file("a", "1")))
	index := mutate.AppendManifests(empty.Index, mutate.IndexAddendum{Add: img})
	reference := registry.push(t, "damaged:1", index)
	damages := map[string]func(path string, data []byte) error{
		"gone":      func(path string, _ []byte) error { return os.Remove(path) },
		"truncated": func(path string, data []byte) error { return os.WriteFile(path, data[:len(data)/2], 0o600) },
		"rotten":    func(path string, data []byte) error { data[len(data)/2] ^= 1; return os.WriteFile(path, data, 0o600) },
	}
	for kind, digest := range map[string]string{"index": digestOf(t, index), "manifest": digestOf(t, img), "configuration": idOf(t, img)} {
		for damage, do := range damages {
			t.Run(damage+" "+kind, func(t *testing.T) {
				s := openStore(t)
				want := collectedAfter(t, s, reference)
				path := filepath.Join(s.dir, "content", "blobs", "sha256", strings.TrimPrefix(digest, "sha256:"))
				data, err := os.ReadFile(path)
				must(t, err)
				must(t, do(path, bytes.Clone(data)))
				registry.breakWith(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
					if r.Method == http.MethodGet {
						refuse(w, http.StatusInternalServerError, "away")
					}
					return r.Method == http.MethodGet
				})
				checkRefused(t, s, reference, Auth{}, isUnavailable, digest)
				registry.breakWith(nil)
				must(t, s.Collect(t.Context())) // a repair that failed has lost nothing else
				harness.Same(t, "layers", entries(t, filepath.Join(s.dir, "overlayfs", "snapshots")), want.snapshots)
				pull(t, s, reference)
				checkFile(t, path, string(data))
				checkLeft(t, s, want)
				s = reopened(t, s)
				image, err := s.Get(reference)
				harness.Want(t, err == nil && image.Spec.Config.User == "7", "%+v, %v", image, err)
				checkFile(t, filepath.Join(mountImage(t, s, image), "a"), "1")
			})
		}
	}
}

func collectedAfter(t *testing.T, s *Store, reference string) leftovers {
	pull(t, s, reference)
	return collected(t, s)
}

func TestFailingRegistryIsUnavailableInItsOwnWords(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	reference := registry.push(t, "fail:1", smallImage(t))
	registry.breakWith(onBlob("", func(w http.ResponseWriter, _ *http.Request, _ http.Handler) bool {
		http.Error(w, "the disk is on fire", http.StatusInternalServerError)
		return true
	}))
	checkRefused(t, s, reference, Auth{}, isUnavailable, "the disk is on fire")
	registry.proxy.CloseClientConnections()
	registry.proxy.Close()
	checkRefused(t, s, reference, Auth{}, isUnavailable, "refused")
}

// Signed addresses, which blobs of large registries are redirected to, are not shown.
func TestSignaturesAreNotShown(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img, layer := bigImage(t)
	reference := registry.push(t, "redirect:1", img)
	expired := newStranger(t, func(w http.ResponseWriter, _ *http.Request) { http.Error(w, "expired", http.StatusForbidden) })
	for address, is := range map[string]func(error) bool{expired.address(): errdefs.IsPermissionDenied, "http://127.0.0.1:1": isUnavailable} {
		registry.breakWith(onBlob(layer, func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			http.Redirect(w, r, address+r.URL.Path+"?signature=secret", http.StatusTemporaryRedirect)
			return true
		}))
		_, err := s.Pull(t.Context(), reference, Auth{}, nil)
		harness.Want(t, is(err) && !strings.Contains(err.Error(), "secret"), "error: %v", err)
	}
}

func TestCancelledPullLeavesNothing(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	img, layer := bigImage(t)
	reference := registry.push(t, "cancel:1", img)
	ctx, cancel := context.WithCancel(t.Context())
	registry.breakWith(onBlob(layer, func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		body := wholeBody(origin, r)
		_, _ = w.Write(body[:len(body)/2])
		w.(http.Flusher).Flush()
		cancel()
		<-r.Context().Done()
		return true
	}))
	_, err := s.Pull(ctx, reference, Auth{}, nil)
	harness.Want(t, errors.Is(err, context.Canceled), "error: %v", err)
	checkLeft(t, s, leftovers{})
	registry.breakWith(nil)
	pull(t, s, reference)
}
