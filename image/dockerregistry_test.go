package image

import (
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"testing"

	"github.com/containerd/errdefs"
)

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
