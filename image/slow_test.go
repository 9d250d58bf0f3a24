package image

import (
	"fmt"
	"net/http"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/minicri/minicri/test/harness"
)

// trickle sends one byte at a time until the client goes.
func trickle(every time.Duration) faultFunc {
	return func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		for _, one := range wholeBody(origin, r) {
			_, _ = w.Write([]byte{one})
			w.(http.Flusher).Flush()
			select {
			case <-r.Context().Done():
				return true
			case <-time.After(every):
			}
		}
		return true
	}
}

// attack: registries: a tenant's registry sends a popular layer byte by byte while others pull it
// held: they stop waiting for it after 10 s below 64 KiB/s and fetch it for themselves
// field: containerd's other pulls wait for as long as the attacker likes
func TestSlowPullIsNotWaitedFor(t *testing.T) {
	s := openStore(t, func(c *Config) { c.waitWindow = time.Second })
	shared, own := layerOf(t, noise("base", 1<<20, 1)), layerOf(t, file("app", "victim"))
	tenant, registry := newTestRegistry(t), newTestRegistry(t)
	attack := tenant.push(t, "attacker:1", imageOf(t, v1.Config{User: "1"}, shared))
	victim := registry.push(t, "victim:1", imageOf(t, v1.Config{}, shared, own))
	tenant.breakWith(onBlob(digestOf(t, shared), trickle(50*time.Millisecond)))
	attacked := make(chan error, 1)
	go func() {
		_, err := s.Pull(t.Context(), attack, Auth{}, nil)
		attacked <- err
	}()
	for len(tenant.blobGets(digestOf(t, shared))) == 0 {
		time.Sleep(time.Millisecond)
	}
	pull(t, s, victim)
	select {
	case err := <-attacked:
		t.Errorf("the attacker's pull ended: %v", err)
	default:
	}
	tenant.breakWith(nil)
	tenant.proxy.CloseClientConnections() // the next try is quick
	must(t, <-attacked)
	checkLeft(t, s, leftovers{blobs: 4, snapshots: 2, records: 2})
}

// attack: registries: a byte now and then, forever
// held: ended at min_rate on average over progress_timeout
// field: containerd has no lower bound but a byte per progress_timeout
func TestTrickleEndsThePull(t *testing.T) {
	s := openStore(t, func(c *Config) { c.ProgressTimeout, c.MinRate = 2*time.Second, 1024 })
	registry := newTestRegistry(t)
	img, layer := bigImage(t)
	reference := registry.push(t, "trickle:1", img)
	registry.breakWith(onBlob(layer, trickle(20*time.Millisecond)))
	checkRefused(t, s, reference, Auth{}, isUnavailable, "less than the minimum of 1024 bytes per second")
}

// endless answers with bytes that do not end before the client goes.
func endless(w http.ResponseWriter, r *http.Request) {
	for block := []byte(strings.Repeat("x", 64<<10)); r.Context().Err() == nil; {
		if _, err := w.Write(block); err != nil {
			return
		}
	}
}

// attack: registries: a manifest, a blob asked for as a manifest, a token, an error that never end
// held: read up to 4 MiB
// field: containerd reads and digests a manifest without Docker-Content-Digest without end
func TestEndlessAnswersAreCutOff(t *testing.T) {
	registry := newTestRegistry(t)
	reference := registry.push(t, "endless:1", smallImage(t))
	manifest := strings.TrimSuffix(reference, ":1") + "@" + digestOf(t, smallImage(t))
	for name, test := range map[string]struct {
		reference string
		fault     faultFunc
	}{
		"manifest": {reference, func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if r.Method == http.MethodGet {
				endless(w, r)
			}
			return strings.Contains(r.URL.Path, "/manifests/")
		}},
		"by digest": {manifest, func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if strings.Contains(r.URL.Path, "/manifests/") {
				http.NotFound(w, r)
			} else if r.Method == http.MethodGet {
				endless(w, r)
			}
			return true
		}},
		"token": {reference, func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if r.URL.Path == "/blobs/token" {
				_, _ = fmt.Fprint(w, `{"token":"`)
				endless(w, r)
				return true
			}
			w.Header().Set("WWW-Authenticate", `Bearer realm="http://`+r.Host+`/blobs/token"`)
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}},
		"error": {reference, func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			w.WriteHeader(http.StatusForbidden)
			if r.Method == http.MethodGet {
				endless(w, r)
			}
			return true
		}},
	} {
		t.Run(name, func(t *testing.T) {
			s := openStore(t)
			registry.breakWith(test.fault)
			began := time.Now()
			_, err := s.Pull(t.Context(), test.reference, Auth{}, nil)
			harness.Want(t, err != nil && !errdefs.IsUnavailable(err), "error: %v", err)
			took := time.Since(began)
			harness.Want(t, took <= time.Minute, "it took %s", took)
		})
	}
}
