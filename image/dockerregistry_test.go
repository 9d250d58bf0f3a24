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

// TestDockerRegistry pulls from Debian's docker-registry over TLS with an authority of
// its own, a client certificate and a password.
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

	writeHosts(t, certs, host, fmt.Sprintf("[host.%q]\nca = %q\n", "https://"+host, keys.cert))
	if _, err := s.Pull(t.Context(), reference, login, nil); !errors.Is(err, ErrRegistryUnavailable) {
		t.Errorf("without a client certificate: %v", err)
	}
	writeHosts(t, certs, host, fmt.Sprintf("[host.%q]\nclient = [[%q, %q]]\n", "https://"+host, keys.cert, keys.key))
	if _, err := s.Pull(t.Context(), reference, login, nil); !errors.Is(err, ErrRegistryUnavailable) {
		t.Errorf("without the authority: %v", err)
	}
	writeHosts(t, certs, host, fmt.Sprintf("[host.%q]\nca = %q\nclient = [[%q, %q]]\n", "https://"+host, keys.cert, keys.cert, keys.key))
	if _, err := s.Pull(t.Context(), reference, Auth{}, nil); !errdefs.IsUnauthorized(err) {
		t.Errorf("without a password: %v", err)
	}
	image, err := s.Pull(t.Context(), reference, login, nil)
	if err != nil || image.ID != idOf(t, img) {
		t.Fatalf("id %s: %v", image.ID, err)
	}
	checkFile(t, filepath.Join(mountImage(t, s, image), "a"), "1")
}

// keyFiles are a certificate, of authority, server and client alike.
type keyFiles struct{ cert, key string }

func makeKeys(t *testing.T, dir string) keyFiles {
	t.Helper()
	key, err := ecdsa.GenerateKey(elliptic.P256(), rand.Reader)
	must(t, err)
	template := &x509.Certificate{
		SerialNumber: big.NewInt(1), Subject: pkix.Name{CommonName: "test"}, IsCA: true, BasicConstraintsValid: true,
		NotAfter: time.Now().Add(time.Hour), IPAddresses: []net.IP{net.IPv4(127, 0, 0, 1)},
		KeyUsage:    x509.KeyUsageCertSign | x509.KeyUsageDigitalSignature,
		ExtKeyUsage: []x509.ExtKeyUsage{x509.ExtKeyUsageServerAuth, x509.ExtKeyUsageClientAuth},
	}
	certificate, err := x509.CreateCertificate(rand.Reader, template, template, &key.PublicKey, key)
	must(t, err)
	der, err := x509.MarshalECPrivateKey(key)
	must(t, err)
	k := keyFiles{cert: filepath.Join(dir, "cert.pem"), key: filepath.Join(dir, "key.pem")}
	writeFile(t, k.cert, string(pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: certificate})))
	writeFile(t, k.key, string(pem.EncodeToMemory(&pem.Block{Type: "EC PRIVATE KEY", Bytes: der})))
	return k
}

func (k keyFiles) transport(t *testing.T) *http.Transport {
	t.Helper()
	pair, err := tls.LoadX509KeyPair(k.cert, k.key)
	must(t, err)
	ca, err := os.ReadFile(k.cert)
	must(t, err)
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
	must(t, err)
	passwords := filepath.Join(dir, "htpasswd")
	writeFile(t, passwords, "user:"+string(hash)+"\n")
	config := fmt.Sprintf(`version: 0.1
log: {level: error}
storage: {filesystem: {rootdirectory: %q}}
auth: {htpasswd: {realm: test, path: %q}}
http:
  addr: %q
  tls: {certificate: %q, key: %q, clientcas: [%q]}
`, filepath.Join(dir, "data"), passwords, host, keys.cert, keys.key, keys.cert)
	file := filepath.Join(dir, "config.yml")
	writeFile(t, file, config)
	var output bytes.Buffer
	server := exec.Command(program, "serve", file)
	server.Stdout, server.Stderr = &output, &output
	must(t, server.Start())
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
	must(t, err)
	defer listener.Close()
	return listener.Addr().String()
}
