package image

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
	"fmt"
	"io"
	"log"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// The examples in docs/registries.md are valid for the code that reads such files.
func TestExamplesOfThePage(t *testing.T) {
	page := harness.Read(t, "../docs/registries.md")
	server := httptest.NewTLSServer(nil)
	defer server.Close()
	pair := server.TLS.Certificates[0]
	key, err := x509.MarshalPKCS8PrivateKey(pair.PrivateKey)
	harness.Check(t, err)
	pemOf := func(kind string, data []byte) string {
		return string(pem.EncodeToMemory(&pem.Block{Type: kind, Bytes: data}))
	}
	read := map[string]int{}
	for _, block := range regexp.MustCompile("(?s)\n```(toml|json)\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
		form, text := block[1], block[2]
		dir := t.TempDir()
		switch {
		case form == "json":
			path := filepath.Join(dir, "docker.json")
			writeFile(t, path, text)
			decoder := json.NewDecoder(strings.NewReader(text))
			decoder.DisallowUnknownFields()
			harness.Check(t, decoder.Decode(&dockerConfig{}))
			for _, helper := range regexp.MustCompile(`"(ecr-login|gcr|pass)"`).FindAllStringSubmatch(text, -1) {
				harness.Check(t, os.WriteFile(filepath.Join(dir, helperPrefix+helper[1]), nil, 0o755))
			}
			t.Setenv("PATH", dir)
			harness.Check(t, checkDockerConfig(path))
		case strings.Contains(text, "/"+hostsFileName+"\n"):
			writeFile(t, filepath.Join(dir, hostsFileName), text)
			for _, name := range []string{"ca.crt", "client.cert"} {
				writeFile(t, filepath.Join(dir, name), pemOf("CERTIFICATE", pair.Certificate[0]))
			}
			writeFile(t, filepath.Join(dir, "client.key"), pemOf("PRIVATE KEY", key))
			if err := checkHostDir(dir); err != nil {
				t.Errorf("%v:\n%s", err, text)
			}
			form = hostsFileName
		}
		read[form]++
	}
	harness.Want(t, read["json"] >= 2 && read[hostsFileName] >= 8, "few examples were read: %v", read)
}

// Each usual failure of a pull has words that docs/registries.md lists with their cure.
func TestErrorsOfThePage(t *testing.T) {
	page := string(harness.Read(t, "../docs/registries.md"))
	const byTLS, plain = `server = "https://%s"`, `server = "http://%s"`
	status := func(code int) http.HandlerFunc {
		return func(w http.ResponseWriter, _ *http.Request) { refuse(w, code, "no") }
	}
	login := Auth{Username: "user", Password: "wrong"}
	secret := func(w http.ResponseWriter, r *http.Request) { demandBasic(w, r) }
	web := func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("Content-Type", "text/html")
	}
	certs := t.TempDir()
	s := openStore(t, func(c *Config) { c.CertsDirs = []string{certs} })
	for _, c := range []struct {
		name, words string // of a row of the page
		hosts       string // %s is the address of the server without its scheme
		answer      http.HandlerFunc
		auth        Auth
	}{
		{"authority", "x509: certificate signed by unknown authority", byTLS, status(http.StatusNotFound), Auth{}},
		{"plain HTTP", "server gave HTTP response to HTTPS client", byTLS, status(http.StatusNotFound), Auth{}},
		{"no such image", "not found", plain, status(http.StatusNotFound), Auth{}},
		{"no login", "no basic auth credentials", plain, secret, Auth{}},
		{"wrong login", "401 Unauthorized", plain, secret, login},
		{"forbidden", "403 Forbidden", plain, status(http.StatusForbidden), Auth{}},
		{"rate limit", "429 Too Many Requests", plain, status(http.StatusTooManyRequests), Auth{}},
		{"failure", "503", plain, status(http.StatusServiceUnavailable), Auth{}},
		{"web page", "returned a page of HTML", plain, web, Auth{}},
		{"wrong file", "registry configuration", `servers = "http://%s"`, web, Auth{}},
		{"refused", "connection refused", `server = "http://%.0s127.0.0.1:1"`, web, Auth{}},
	} {
		t.Run(c.name, func(t *testing.T) {
			server := httptest.NewUnstartedServer(c.answer)
			server.Config.ErrorLog = log.New(io.Discard, "", 0)
			start := server.Start
			if c.name == "authority" {
				start = server.StartTLS
			}
			start()
			defer server.Close()
			writeHosts(t, certs, "registry.example", fmt.Sprintf(c.hosts, hostOfURL(server.URL)))
			_, err := s.Pull(t.Context(), "registry.example/app:v1", c.auth, nil)
			harness.WantError(t, err, c.words)
			harness.Want(t, strings.Contains(page, "`"+c.words), "docs/registries.md has no row for %q", c.words)
		})
	}
}
