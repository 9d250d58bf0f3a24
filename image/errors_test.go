package image

import (
	"context"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"io"
	"log"
	"math/big"
	"net"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/minicri/minicri/internal/errtext"
	"github.com/minicri/minicri/test/harness"
)

func isCertificate(err error) bool {
	_, is := errors.AsType[*tls.CertificateVerificationError](err)
	return is && isUnavailable(err)
}

// tlsServer serves with a certificate of an authority of its own, for names and until a time.
func tlsServer(t *testing.T, handler http.Handler, until time.Time, names ...string) *httptest.Server {
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "Own CA"},
		NotBefore: time.Unix(0, 0), NotAfter: until, IsCA: true, BasicConstraintsValid: true,
	}
	for _, name := range names {
		if ip := net.ParseIP(name); ip != nil {
			template.IPAddresses = append(template.IPAddresses, ip)
		} else {
			template.DNSNames = append(template.DNSNames, name)
		}
	}
	der, err := x509.CreateCertificate(rand.Reader, template, template, key.Public(), key)
	must(t, err)
	server := httptest.NewUnstartedServer(handler)
	server.TLS = &tls.Config{Certificates: []tls.Certificate{{Certificate: [][]byte{der}, PrivateKey: key}}}
	server.Config.ErrorLog = log.New(io.Discard, "", 0)
	server.StartTLS()
	t.Cleanup(server.Close)
	return server
}

// TestErrorsNameTheCure reads the text that the kubelet shows in an event: it has the cause and the cure, and no words
// of a wrong cure. docs/registries.md lists the usual failures.
func TestErrorsNameTheCure(t *testing.T) {
	page := string(harness.Read(t, "../docs/registries.md"))
	certs, config := t.TempDir(), filepath.Join(t.TempDir(), "config.json")
	s := openStore(t, func(c *Config) { c.CertsDirs, c.DockerConfig = []string{certs}, config })
	registry := newTestRegistry(t)
	registry.push(t, "app:1", smallImage(t))
	file := func(host string) string { return filepath.Join(certs, host, "hosts.toml") }
	login := Auth{Username: "user", Password: "wrong"}
	year := time.Now().AddDate(1, 0, 0)
	unknown, expired := tlsServer(t, registry, year, "127.0.0.1"), tlsServer(t, registry, time.Unix(1, 0), "127.0.0.1")
	other, client := tlsServer(t, registry, year, "other.example"), tlsServer(t, registry, year, "127.0.0.1")
	client.TLS.ClientAuth = tls.RequireAnyClientCert
	for _, server := range []*httptest.Server{expired, other, client} { // their authority is in hosts.toml
		host := hostOfURL(server.URL)
		cert := filepath.Join(t.TempDir(), "ca.pem")
		writeFile(t, cert, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: server.Certificate().Raw})))
		writeHosts(t, certs, host, fmt.Sprintf("server = %q\nca = %q\n", server.URL, cert))
	}
	writeHosts(t, certs, hostOfURL(unknown.URL), fmt.Sprintf("server = %q\nskip_verify = false\n", unknown.URL))
	writeHosts(t, certs, "plain.example", fmt.Sprintf("server = \"https://%s\"\nskip_verify = false\n",
		registry.host()))
	writeHosts(t, certs, "tls.example", fmt.Sprintf("server = \"http://%s\"\n", hostOfURL(unknown.URL)))
	writeHosts(t, certs, "dead.example", "server = \"http://127.0.0.1:1\"\n")
	writeHosts(t, certs, "nowhere.example", "server = \"http://no-such-host.invalid\"\n")
	foreign := ocispec.Platform{OS: "linux", Architecture: "s390x"}
	index := ocispec.Index{MediaType: ocispec.MediaTypeImageIndex, Manifests: []ocispec.Descriptor{
		{MediaType: ocispec.MediaTypeImageManifest, Digest: someDigest, Size: 1, Platform: &foreign},
	}}
	registry.name("foreign:1", index.MediaType, index)
	lacking := registry.handmade(t)
	lacking.Layers[0].Digest = someDigest
	registry.name("lacking:1", lacking.MediaType, lacking)
	spoilt := registry.handmade(t)
	spoilt.Layers[0] = registry.Blob(ocispec.MediaTypeImageLayer, pax(t, "f b 644 0:0 b"))
	registry.name("spoilt:1", spoilt.MediaType, spoilt)
	h := registry.host()
	code := func(code int, words string, header ...string) faultFunc {
		return func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
			status(code, nil, header...)(w, r, origin)
			_, _ = fmt.Fprintf(w, `{"errors": [{"code": "DENIED", "message": %q}]}`, words)
			return true
		}
	}
	const basic = `Basic realm="r"`
	none := Auth{}
	app := func(server *httptest.Server) string { return hostOfURL(server.URL) + "/app:1" }
	html := status(200, nil, "Content-Type", "text/html")
	writeHosts(t, certs, "wrong.example", "servers = \"http://x\"\n")
	forbidden := code(403, "not for you")
	for _, test := range []struct {
		name, reference string
		auth            Auth
		fault           faultFunc
		is              func(error) bool
		no              string // words of another cure
		words           []string
		row             string // words of a row of docs/registries.md; they are in the error
	}{
		{"no tag", h + "/app:2", none, code(404, "manifest unknown"), errdefs.IsNotFound, "resolve", []string{
			"pull " + h + "/app:2: not found in registry " + h + ": denied: manifest unknown",
			"check name and tag", "imagePullSecrets",
		}, "not found"},
		{
			"no tag, with credentials", h + "/app:2", login, code(404, "x"), errdefs.IsNotFound, "provide",
			[]string{"the account can read this"},
			"",
		},
		{
			"no credentials", h + "/app:1", none, status(401, nil, "WWW-Authenticate",
				basic), errdefs.IsUnauthorized, "refuses",
			[]string{"requires credentials", "imagePullSecrets", "images.docker_config"},
			"no basic auth credentials",
		},
		{
			"wrong credentials", h + "/app:1", login, code(401, "bad password", "WWW-Authenticate",
				basic), errdefs.IsUnauthorized,
			"requires credentials",
			[]string{"bad password", "refuses the credentials of the request (imagePullSecrets)"},
			"401 Unauthorized",
		},
		{
			"wrong credentials, token", h + "/app:1", login, tokens(bearer,
				nil), errdefs.IsUnauthorized, "requires credentials",
			[]string{"/token: 401 Unauthorized", "who are you", "refuses the credentials of the request"},
			"",
		},
		{
			"403", h + "/app:1", none, forbidden, errdefs.IsPermissionDenied, "check its rights",
			[]string{"not for you", "provide credentials", "imagePullSecrets"},
			"403 Forbidden",
		},
		{
			"403 with credentials", h + "/app:1", login, func(w http.ResponseWriter, r *http.Request,
				origin http.Handler,
			) bool {
				if r.Header.Get("Authorization") == "" {
					return status(401, nil, "WWW-Authenticate", basic)(w, r, origin)
				}
				return forbidden(w, r, origin)
			}, errdefs.IsPermissionDenied, "provide credentials",
			[]string{"403 Forbidden", "the account of the request (imagePullSecrets)", "check its rights"},
			"",
		},
		{
			"429", h + "/app:1", none, code(429, "slow down", "Retry-After",
				"3600"), errdefs.IsResourceExhausted, "free space",
			[]string{"(Retry-After: 1h0m0s)", "slow down", "limits pulls", file(h)},
			"429 Too Many Requests",
		},
		{
			"503", h + "/app:1", none, status(503, nil, "Retry-After", "60"), isUnavailable, "firewall",
			[]string{"503 Service Unavailable (Retry-After: 1m0s)", "retry later", file(h)},
			"503",
		},
		{"web page", h + "/app:1", none, html, nil, "DNS", nil, "returned a page of HTML"},
		{
			"wrong file", "wrong.example/app:1", none, nil, errdefs.IsFailedPrecondition, "firewall", nil,
			"registry configuration",
		},
		{
			"unknown authority", app(unknown), none, nil, isCertificate, "firewall",
			[]string{`ca = "/path/to/ca.pem"`, `"CN=Own CA"`, "in " + file(hostOfURL(unknown.URL))},
			"x509: certificate signed by unknown authority",
		},
		{
			"expired", app(expired), none, nil, isCertificate, "ca =",
			[]string{"renew", "clock"},
			"x509: certificate has expired or is not yet valid",
		},
		{
			"another name", app(other), none, nil, isCertificate, "ca =",
			[]string{"x509", "certificate", "for other names"},
			"",
		},
		{"client certificate", app(client), none, nil, isUnavailable, "ca =", []string{"tls", "client = [["}, ""},
		{
			"plain HTTP", "plain.example/app:1", none, nil, isUnavailable, "firewall",
			[]string{`serves plain HTTP: set server = "http://` + h + `" in ` + file("plain.example")},
			"server gave HTTP response to HTTPS client",
		},
		{
			"TLS", "tls.example/app:1", none, nil, nil, "firewall",
			[]string{`requires HTTPS: set server = "https://` + hostOfURL(unknown.URL) + `" in ` + file("tls.example")},
			"",
		},
		{
			"DNS", "nowhere.example/app:1", none, nil, isUnavailable, "firewall",
			[]string{"check the name no-such-host.invalid", "/etc/resolv.conf"},
			"",
		},
		{
			"refused", "dead.example/app:1", none, nil, isUnavailable, "DNS",
			[]string{"check whether the registry answers from this node", "HTTPS_PROXY", file("dead.example")},
			"connection refused",
		},
		{
			"another platform", h + "/foreign:1", none, nil, errdefs.IsNotFound, "push",
			[]string{"the image is for linux/s390x, not for this node, a linux/" + nodePlatformArch()},
			"",
		},
		{
			"a part is lacking", h + "/lacking:1", none, nil, errdefs.IsNotFound, "check name",
			[]string{"layer", "not found", "lacks a part", "push the image again"},
			"",
		},
		{
			"wrong content", h + "/spoilt:1", none, nil, errdefs.IsDataLoss, "free space",
			[]string{"wrong diff id", "other bytes than the image names"},
			"",
		},
	} {
		t.Run(test.name, func(t *testing.T) {
			registry.breakWith(test.fault)
			_, err := s.Pull(t.Context(), test.reference, test.auth, nil)
			harness.Need(t, err != nil, "kind: %v", err)
			harness.Want(t, test.is == nil || test.is(err), "kind: %v", err)
			text := errtext.Of(err)
			harness.Want(t, len(text) <= maxText && !strings.Contains(text, "\n"), "too long for an event: %s", text)
			harness.Want(t, strings.Contains(page, "`"+test.row), "docs/registries.md has no row for %q", test.row)
			for _, words := range append(test.words, test.row) {
				harness.Want(t, strings.Contains(text, words), "%s: lacks %q", text, words)
			}
			harness.Want(t, !strings.Contains(text, test.no), "%s: says %q", text, test.no)
		})
	}
}

// A pull waits for a registry that sends Retry-After, and the wait ends with the pull.
func TestAWaitEndsWithThePull(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	reference := registry.push(t, "app:1", smallImage(t))
	ctx, cancel := context.WithCancel(t.Context())
	asked := make(chan struct{}, 100)
	registry.breakWith(func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		asked <- struct{}{}
		return status(503, nil, "Retry-After", "9")(w, r, origin)
	})
	failed := make(chan error)
	go func() {
		_, err := s.Pull(ctx, reference, Auth{}, nil)
		failed <- err
	}()
	<-asked // HEAD
	<-asked // GET
	cancel()
	harness.Want(t, errdefs.IsCanceled(<-failed) || ctx.Err() != nil, "the pull did not end")
}
