package e2e

import (
	"context"
	"crypto/tls"
	"crypto/x509"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// What metrics_address shows over TLS: the daemon's own, with the last reload, images
// and the disk, and those of pods under cAdvisor's names.
func TestMetricsAddress(t *testing.T) {
	cert, key, pool := testCertificate(t)
	n := newNode(t, harness.Config(fmt.Sprintf("log_format = 'text'\nmetrics_address = '127.0.0.1:9440'\nmetrics_tls_cert = '%s'\nmetrics_tls_key = '%s'\n", cert, key)))
	n.RunPod(n.PodConfig("shown"))
	client := http.Client{Timeout: patience, Transport: &http.Transport{
		DisableKeepAlives: true, TLSClientConfig: &tls.Config{RootCAs: pool},
		DialContext: func(_ context.Context, network, address string) (conn net.Conn, err error) {
			n.RunInNetns(func() error {
				conn, err = net.Dial(network, address)
				return nil
			})
			return conn, err
		},
	}}
	shows := func(path, text string) {
		t.Helper()
		eventually(t, path+" shows "+text, patience, func() bool {
			answer, err := client.Get("https://127.0.0.1:9440" + path)
			if err != nil {
				return false // it does not listen yet
			}
			defer answer.Body.Close()
			body, err := io.ReadAll(answer.Body)
			return err == nil && strings.Contains(string(body), text)
		})
	}
	for _, text := range []string{
		"\nminicri_config_last_reload_successful 1\n", "\nminicri_config_last_reload_success_timestamp_seconds 1", "\nminicri_images ", "\nminicri_disk_free_bytes ", "\nminicri_disk_free_inodes ",
	} {
		shows("/metrics", text)
	}
	shows("/metrics/cadvisor", `pod="shown"`)
	rewrite(t, n, "log_format = 'text'", "log_format = 'loud'")
	check(t, syscall.Kill(n.PID(), syscall.SIGHUP))
	shows("/metrics", "\nminicri_config_last_reload_successful 0\n")
}

// testCertificate is that of net/http/httptest, for 127.0.0.1, in files.
func testCertificate(t *testing.T) (cert, key string, pool *x509.CertPool) {
	t.Helper()
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	pair := server.TLS.Certificates[0]
	encoded, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	check(t, err)
	dir := t.TempDir()
	cert, key = filepath.Join(dir, "cert.pem"), filepath.Join(dir, "key.pem")
	check(t, os.WriteFile(cert, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: pair.Certificate[0]}), 0o600))
	check(t, os.WriteFile(key, pem.EncodeToMemory(&pem.Block{Type: "PRIVATE KEY", Bytes: encoded}), 0o600))
	pool = x509.NewCertPool()
	pool.AddCert(server.Certificate())
	return cert, key, pool
}
