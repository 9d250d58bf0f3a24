package image

import (
	"encoding/json"
	"os"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// The examples in docs/registries.md are valid for the code that reads such files.
func TestExamplesOfThePage(t *testing.T) {
	page := harness.Read(t, "../docs/registries.md")
	read := map[string]int{}
	for _, block := range regexp.MustCompile("(?s)\n```(toml|json)\n(.*?)```").FindAllStringSubmatch(string(page), -1) {
		form, text := block[1], block[2]
		dir := t.TempDir()
		switch {
		case form == "json":
			path := filepath.Join(dir, "docker.json")
			harness.Check(t, os.WriteFile(path, []byte(text), 0o600))
			decoder := json.NewDecoder(strings.NewReader(text))
			decoder.DisallowUnknownFields()
			harness.Check(t, decoder.Decode(&dockerConfig{}))
			for _, helper := range regexp.MustCompile(`"(ecr-login|gcr|pass)"`).FindAllStringSubmatch(text, -1) {
				harness.Check(t, os.WriteFile(filepath.Join(dir, helperPrefix+helper[1]), nil, 0o755))
			}
			t.Setenv("PATH", dir)
			harness.Check(t, checkDockerConfig(path))
		case strings.Contains(text, "/"+hostsFileName+"\n"):
			harness.Check(t, os.WriteFile(filepath.Join(dir, hostsFileName), []byte(text), 0o644))
			harness.Certificate(t, filepath.Join(dir, "client.cert"), filepath.Join(dir, "client.key"), time.Hour)
			harness.Certificate(t, filepath.Join(dir, "ca.crt"), filepath.Join(dir, "ca.key"), time.Hour)
			if err := checkHostDir(dir); err != nil {
				t.Errorf("%v:\n%s", err, text)
			}
			form = hostsFileName
		}
		read[form]++
	}
	harness.Want(t, read["json"] >= 2 && read[hostsFileName] >= 8, "few examples were read: %v", read)
}
