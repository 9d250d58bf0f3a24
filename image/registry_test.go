package image

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/partial"
	"github.com/google/go-containerregistry/pkg/v1/types"

	hostile "github.com/minicri/minicri/test/hostile/registry"
)

// testRegistry is a registry served over HTTP on loopback, which notes requests and breaks those
// that a test asks it to.
type testRegistry struct {
	*hostile.Registry
	proxy *httptest.Server

	mu       sync.Mutex
	requests []seenRequest
	fault    faultFunc
}

type seenRequest struct {
	method, path, byteRange, authorization string
	shown                                  string // all of its headers, and a form
}

// faultFunc answers a request in the registry's place, or returns false.
type faultFunc func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool

func newTestRegistry(t testing.TB) *testRegistry {
	r := &testRegistry{Registry: hostile.New()}
	r.proxy = httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, req *http.Request) {
		_ = req.ParseForm()
		shown := fmt.Sprint(req.Header, req.PostForm)
		r.mu.Lock()
		r.requests = append(r.requests, seenRequest{req.Method, req.URL.Path, req.Header.Get("Range"), req.Header.Get("Authorization"), shown})
		fault := r.fault
		r.mu.Unlock()
		if fault != nil && fault(w, req, r.Registry) {
			return
		}
		r.ServeHTTP(w, req)
	}))
	t.Cleanup(func() {
		r.proxy.CloseClientConnections()
		r.proxy.Close()
	})
	return r
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

// push stores an image or an index and all that it names, and returns its reference.
func (r *testRegistry) push(t testing.TB, path string, what partial.WithRawManifest) string {
	var kind types.MediaType
	var err error
	switch what := what.(type) {
	case v1.ImageIndex:
		kind, err = what.MediaType()
		must(t, err)
		manifest, err := what.IndexManifest()
		must(t, err)
		for _, m := range manifest.Manifests {
			var child partial.WithRawManifest
			if child, err = what.Image(m.Digest); m.MediaType.IsIndex() {
				child, err = what.ImageIndex(m.Digest)
			}
			must(t, err)
			r.push(t, path, child) // which loses the tag again
		}
	case v1.Image:
		kind, err = what.MediaType()
		must(t, err)
		config, err := what.RawConfigFile()
		must(t, err)
		r.Blob("", config)
		layers, err := what.Layers()
		must(t, err)
		for _, layer := range layers {
			content, err := layer.Compressed()
			must(t, err)
			data, err := io.ReadAll(content)
			must(t, err)
			r.Blob("", data)
		}
	}
	manifest, err := what.RawManifest()
	must(t, err)
	return r.name(path, string(kind), json.RawMessage(manifest))
}

// name names a manifest or an index, repository:tag, and returns its reference.
func (r *testRegistry) name(path, mediaType string, manifest any) string {
	r.Manifest(path, mediaType, manifest)
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
	at := filepath.Join(dir, host)
	must(t, errors.Join(os.MkdirAll(at, 0o755), os.WriteFile(filepath.Join(at, "hosts.toml"), []byte(text), 0o644)))
}

// checkRefused pulls what cannot be pulled.
func checkRefused(t testing.TB, s *Store, reference string, auth Auth, is func(error) bool, words string) {
	t.Helper()
	if _, err := s.Pull(t.Context(), reference, auth, nil); err == nil || !is(err) || !strings.Contains(err.Error(), words) {
		t.Errorf("pull %s: %v, want %q", reference, err, words)
	}
}

func isUnavailable(err error) bool { return errors.Is(err, ErrRegistryUnavailable) }

// TestRegistryOverTLS pulls from a registry with an authority of its own, which wants a
// client certificate and a password.
func TestRegistryOverTLS(t *testing.T) {
	registry, certs, keys := newTestRegistry(t), t.TempDir(), t.TempDir()
	registry.push(t, "team/app:1", smallImage(t))
	server := httptest.NewUnstartedServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if !demandBasic(w, r) {
			registry.ServeHTTP(w, r)
		}
	}))
	server.TLS = &tls.Config{ClientAuth: tls.RequireAnyClientCert}
	server.StartTLS()
	t.Cleanup(server.Close)
	cert, key := filepath.Join(keys, "cert.pem"), filepath.Join(keys, "key.pem")
	writeFile(t, cert, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
	der, err := x509.MarshalPKCS8PrivateKey(server.TLS.Certificates[0].PrivateKey)
	must(t, err)
	writeFile(t, key, string(pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: der})))
	s, host := openStore(t, func(c *Config) { c.CertsDirs = []string{certs} }), hostOfURL(server.URL)
	login := Auth{Username: "user", Password: "pass"}
	for _, test := range []struct {
		keys string
		auth Auth
		is   func(error) bool // nil: pulled
	}{
		{fmt.Sprintf("ca = %q", cert), login, isUnavailable},
		{fmt.Sprintf("client = [[%q, %q]]", cert, key), login, isUnavailable},
		{fmt.Sprintf("ca = %q\nclient = [[%q, %q]]", cert, cert, key), Auth{}, errdefs.IsUnauthorized},
		{fmt.Sprintf("ca = %q\nclient = [[%q, %q]]", cert, cert, key), login, nil},
	} {
		writeHosts(t, certs, host, fmt.Sprintf("[host.%q]\n%s\n", server.URL, test.keys))
		_, err := s.Pull(t.Context(), host+"/team/app:1", test.auth, nil)
		if test.is == nil && err != nil || test.is != nil && !test.is(err) {
			t.Errorf("%s: %v", test.keys, err)
		}
	}
}
