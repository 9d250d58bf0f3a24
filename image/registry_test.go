package image

import (
	"bytes"
	"errors"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/google/go-containerregistry/pkg/name"
	"github.com/google/go-containerregistry/pkg/registry"
	"github.com/google/go-containerregistry/pkg/v1/remote"
)

// testRegistry is a registry served over HTTP on loopback, behind a proxy that
// counts requests and breaks those that a test asks it to.
type testRegistry struct {
	origin *httptest.Server
	proxy  *httptest.Server

	mu       sync.Mutex
	requests []seenRequest
	fault    faultFunc
}

type seenRequest struct {
	method, path, byteRange, authorization string
}

// faultFunc answers a request in the registry's place, or returns false.
type faultFunc func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool

func newTestRegistry(t testing.TB) *testRegistry {
	t.Helper()
	handler := withRanges(registry.New(registry.Logger(log.New(io.Discard, "", 0))))
	r := &testRegistry{origin: httptest.NewServer(handler)}
	r.proxy = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		r.mu.Lock()
		r.requests = append(r.requests, seenRequest{req.Method, req.URL.Path, req.Header.Get("Range"), req.Header.Get("Authorization")})
		fault := r.fault
		r.mu.Unlock()
		if fault != nil && fault(w, req, handler) {
			return
		}
		handler.ServeHTTP(w, req)
	}))
	t.Cleanup(func() {
		r.proxy.CloseClientConnections()
		r.proxy.Close()
		r.origin.Close()
	})
	return r
}

// withRanges teaches the registry ranges without an end, which it refuses.
func withRanges(registry http.Handler) http.Handler {
	return http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if r.Method == http.MethodGet && r.Header.Get("Range") != "" {
			http.ServeContent(w, r, "", time.Time{}, bytes.NewReader(wholeBody(registry, r)))
			return
		}
		registry.ServeHTTP(w, r)
	})
}

// breakWith sets what happens to requests from now on; nil heals.
func (r *testRegistry) breakWith(fault faultFunc) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.fault = fault
}

func (r *testRegistry) seen(match func(seenRequest) bool) (found []seenRequest) {
	r.mu.Lock()
	defer r.mu.Unlock()
	for _, req := range r.requests {
		if match(req) {
			found = append(found, req)
		}
	}
	return found
}

func (r *testRegistry) blobGets(digest string) []seenRequest {
	return r.seen(func(s seenRequest) bool {
		return s.method == http.MethodGet && strings.HasSuffix(s.path, "/blobs/"+digest)
	})
}

func (r *testRegistry) host() string { return hostOfURL(r.proxy.URL) }

func hostOfURL(address string) string { return address[strings.LastIndex(address, "/")+1:] }

// push puts an image or an index into the registry, past the proxy, and returns
// the reference under which the proxy serves it.
func (r *testRegistry) push(t testing.TB, path string, what remote.Taggable) string {
	t.Helper()
	ref, err := name.ParseReference(hostOfURL(r.origin.URL)+"/"+path, name.Insecure)
	must(t, err)
	must(t, remote.Push(ref, what))
	return r.host() + "/" + path
}

// onBlob limits a fault to GETs of one blob; an empty digest means all blobs.
func onBlob(digest string, fault faultFunc) faultFunc {
	return func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		return r.Method == http.MethodGet && strings.Contains(r.URL.Path, "/blobs/"+digest) && fault(w, r, origin)
	}
}

// wholeBody fetches what the registry would have sent, whole.
func wholeBody(origin http.Handler, r *http.Request) []byte {
	whole := r.Clone(r.Context())
	whole.Header.Del("Range")
	recorder := httptest.NewRecorder()
	origin.ServeHTTP(recorder, whole)
	return recorder.Body.Bytes()
}

// writeHosts writes a hosts.toml for host into dir.
func writeHosts(t testing.TB, dir, host, text string) {
	t.Helper()
	at := filepath.Join(dir, host)
	must(t, os.MkdirAll(at, 0o755))
	must(t, os.WriteFile(filepath.Join(at, "hosts.toml"), []byte(text), 0o644))
}

// checkRefused pulls what cannot be pulled.
func checkRefused(t testing.TB, s *Store, reference string, auth Auth, is func(error) bool, words string) {
	t.Helper()
	if _, err := s.Pull(t.Context(), reference, auth, nil); err == nil || !is(err) || !strings.Contains(err.Error(), words) {
		t.Errorf("pull %s: %v, want %q", reference, err, words)
	}
}

func isUnavailable(err error) bool { return errors.Is(err, ErrRegistryUnavailable) }
