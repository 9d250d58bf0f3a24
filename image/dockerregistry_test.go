package image

import (
	"bytes"
	"crypto/ecdsa"
	"crypto/elliptic"
	"crypto/rand"
	"crypto/tls"
	"crypto/x509"
	"crypto/x509/pkix"
	"encoding/pem"
	"errors"
	"fmt"
	"math/big"
	"net"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/google/go-containerregistry/pkg/authn"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/remote"
	"golang.org/x/crypto/bcrypt"
)

// TestDockerRegistry pulls from Debian's docker-registry over TLS with a
// certificate authority of its own, a client certificate and a password.
func TestDockerRegistry(t *testing.T) {
	dir := t.TempDir()
	keys := makeKeys(t, dir)
	host := startDockerRegistry(t, dir, keys)
	img := imageOf(t, v1.Config{}, layerOf(t, file("a", "1")), layerOf(t, noise("b", 1<<20, 9)))
	pushTo(t, host+"/team/app:1", img, remote.WithTransport(keys.transport(t)),
		remote.WithAuth(&authn.Basic{Username: "user", Password: "pass"}))
	certs := t.TempDir()
	s := openStore(t, func(c *Config) { c.CertsDirs = []string{certs} })
	reference, login := host+"/team/app:1", Auth{Username: "user", Password: "pass"}

	writeHosts(t, certs, host, fmt.Sprintf("[host.%q]\nca = %q\n", "https://"+host, keys.ca))
	if _, err := s.Pull(t.Context(), reference, login, nil); !errors.Is(err, ErrRegistryUnavailable) {
		t.Errorf("without a client certificate: %v", err)
	}
	writeHosts(t, certs, host, fmt.Sprintf("[host.%q]\nclient = [[%q, %q]]\n", "https://"+host, keys.cert, keys.key))
	if _, err := s.Pull(t.Context(), reference, login, nil); !errors.Is(err, ErrRegistryUnavailable) {
		t.Errorf("without the authority: %v", err)
	}
	writeHosts(t, certs, host, fmt.Sprintf("[host.%q]\nca = %q\nclient = [[%q, %q]]\n", "https://"+host, keys.ca, keys.cert, keys.key))
	if _, err := s.Pull(t.Context(), reference, Auth{}, nil); !errdefs.IsUnauthorized(err) {
		t.Errorf("without a password: %v", err)
	}
	image, err := s.Pull(t.Context(), reference, login, nil)
	if err != nil || image.ID != idOf(t, img) {
		t.Fatalf("id %s: %v", image.ID, err)
	}
	if data, err := os.ReadFile(filepath.Join(mountImage(t, s, image), "a")); string(data) != "1" {
		t.Errorf("a holds %q: %v", data, err)
	}
}

// keyFiles are one authority and one certificate, of server and client alike.
type keyFiles struct{ ca, cert, key string }

func makeKeys(t *testing.T, dir string) keyFiles {
	t.Helper()
	caKey, key := newKey(t), newKey(t)
	ca := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test authority"}, IsCA: true, BasicConstraintsValid: true,
		NotAfter: time.Now().Add(time.Hour), KeyUsage: x509.KeyUsageCertSign,
	}
	leaf := &x509.Certificate{
		SerialNumber: big.NewInt(2), Subject: pkix.Name{CommonName: "test"}, NotAfter: time.Now().Add(time.Hour),
		IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)}, KeyUsage: x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	der, err := x509.MarshalECPrivateKey(key)
	if err != nil {
		t.Fatal(err)
	}
	return keyFiles{
		ca:   writePEM(t, dir, "ca.pem", "CERTIFICATE", sign(t, ca, ca, &caKey.PublicKey, caKey)),
		cert: writePEM(t, dir, "cert.pem", "CERTIFICATE", sign(t, leaf, ca, &key.PublicKey, caKey)),
		key:  writePEM(t, dir, "key.pem", "EC PRIVATE KEY", der),
	}
}

func newKey(t *testing.T) *ecdsa.PrivateKey {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	if err != nil {
		t.Fatal(err)
	}
	return key
}

func sign(t *testing.T, template, parent *x509.Certificate, public *ecdsa.PublicKey, by *ecdsa.PrivateKey) []byte {
	t.Helper()
	der, err := x509.CreateCertificate(rand.Reader, template, parent, public, by)
	if err != nil {
		t.Fatal(err)
	}
	return der
}

func writePEM(t *testing.T, dir, name, kind string, der []byte) string {
	t.Helper()
	path := filepath.Join(dir, name)
	if err := os.WriteFile(path, pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: der}), 0o600); err != nil {
		t.Fatal(err)
	}
	return path
}

func (k keyFiles) transport(t *testing.T) *http.Transport {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(k.cert, k.key)
	if err != nil {
		t.Fatal(err)
	}
	ca, err := os.ReadFile(k.ca)
	if err != nil {
		t.Fatal(err)
	}
	pool := x509.NewCertPool()
	pool.AppendCertsFromPEM(ca)
	transport := &http.Transport{TLSClientConfig: &tls.Config{RootCAs: pool, Certificates: []tls.Certificate{pair}}}
	t.Cleanup(transport.CloseIdleConnections)
	return transport
}

// startDockerRegistry runs the registry until the test ends.
func startDockerRegistry(t *testing.T, dir string, keys keyFiles) (host string) {
	t.Helper()
	program, err := exec.LookPath("docker-registry")
	if err != nil {
		t.Fatal("docker-registry is missing: run make setup")
	}
	host = freeAddress(t)
	hash, err := bcrypt.GenerateFromPassword([]byte("pass"), bcrypt.MinCost)
	if err != nil {
		t.Fatal(err)
	}
	passwords := filepath.Join(dir, "htpasswd")
	if err := os.WriteFile(passwords, []byte("user:"+string(hash)+"\n"), 0o600); err != nil {
		t.Fatal(err)
	}
	config := fmt.Sprintf(`version: 0.1
log: {level: error}
storage: {filesystem: {rootdirectory: %q}}
auth: {htpasswd: {realm: test, path: %q}}
http:
  addr: %q
  tls: {certificate: %q, key: %q, clientcas: [%q]}
`, filepath.Join(dir, "data"), passwords, host, keys.cert, keys.key, keys.ca)
	file := filepath.Join(dir, "config.yml")
	if err := os.WriteFile(file, []byte(config), 0o600); err != nil {
		t.Fatal(err)
	}
	var output bytes.Buffer
	server := exec.Command(program, "serve", file)
	server.Stdout, server.Stderr = &output, &output
	if err := server.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = server.Process.Kill(); _ = server.Wait() })
	for began := time.Now(); ; time.Sleep(20 * time.Millisecond) {
		if conn, err := net.Dial("tcp", host); err == nil {
			_ = conn.Close()
			return host
		}
		if time.Since(began) > time.Minute {
			t.Fatalf("docker-registry does not listen: %s", output.String())
		}
	}
}

func freeAddress(t *testing.T) string {
	t.Helper()
	listener, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	return listener.Addr().String()
}
