package image

import (
	"crypto/x509"
	"encoding/json"
	"encoding/pem"
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
