package image

import (
	"log/slog"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"strings"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/test/harness"
)

// spoiltHosts are files that say less than their author thinks, each with what the
// error says. MIRROR is the mirror's address.
var spoiltHosts = map[string]struct{ text, want string }{
	"capability":      {"[host.\"MIRROR\"]\ncapabilities = [\"pull\", \"resolv\"]", `line 2: host.MIRROR.capabilities: "resolv" is none of`},
	"skip_verify":     {"[host.\"MIRROR\"]\nskip_verify = \"true\"", "line 2: host.MIRROR.skip_verify: "},
	"dial_timeout":    {"[host.\"MIRROR\"]\n\ndial_timeout = \"5\"", "line 3: host.MIRROR.dial_timeout: time: missing unit"},
	"a negative time": {"[host.\"MIRROR\"]\ndial_timeout = \"-5s\"", "line 2: host.MIRROR.dial_timeout: -5s is no time"},
	"unknown key":     {"[host.\"MIRROR\"]\ncapabilites = [\"pull\"]", "line 2: host.MIRROR.capabilites: there is no such key"},
	"unknown table":   {"[hosts.\"MIRROR\"]\ncapabilities = [\"pull\"]", "line 1: hosts.MIRROR: there is no such key"},
	"ca":              {"[host.\"MIRROR\"]\nca = 5", "line 2: host.MIRROR.ca: 5 is neither a text nor a list"},
	"client":          {"[host.\"MIRROR\"]\nclient = [[\"a\", \"b\", \"c\"]]", "line 2: host.MIRROR.client: "},
	"header":          {"[host.\"MIRROR\"]\n[host.\"MIRROR\".header]\nx = { y = 1 }", "line 3: host.MIRROR.header.x: "},
	"no table":        {"host = { \"MIRROR\" = { capabilities = [\"pull\"] } }", "line 1: host.MIRROR: it has to be a table of its own"},
	"an address":      {"[host.\"MIRROR\"]\n[host.\"https://\"]", `line 2: host.https://: "https://" is no address of a registry`},
	"the server":      {"server = \"httpx://x\"\n[host.\"MIRROR\"]", `line 1: server: "httpx://x" is no address of a registry`},
	"a bare server":   {"[host.\"MIRROR\"]\n[server]\nx = 1", "line "},
}

// attack: registries: a hosts.toml with a wrong value, an unknown key, a host that is not written as a table
// held: the pull fails with file, line and key; neither the mirror nor the registry behind it is asked; the start warns
// field: containerd logs it and goes past the mirror to the registry itself
func TestAWrongHostsFileFailsThePull(t *testing.T) {
	certs := t.TempDir()
	s := openStore(t, func(c *Config) { c.CertsDirs = []string{certs} })
	mirror := newTestRegistry(t)
	mirror.push(t, "app:1", smallImage(t))
	var asked atomic.Bool
	origin := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) {
		asked.Store(true)
		w.WriteHeader(http.StatusNotFound)
	}))
	defer origin.Close()
	host := hostOfURL(origin.URL)
	before := len(mirror.seen(func(seenRequest) bool { return true }))
	for name, test := range spoiltHosts {
		t.Run(name, func(t *testing.T) {
			address := "http://" + mirror.host()
			writeHosts(t, certs, host, strings.ReplaceAll(test.text, "MIRROR", address))
			want := strings.ReplaceAll(test.want, "MIRROR", address)
			checkRefused(t, s, host+"/app:1", Auth{}, errdefs.IsFailedPrecondition, filepath.Join(certs, host, "hosts.toml")+": "+want)
			harness.Want(t, !asked.Load() && len(mirror.seen(func(seenRequest) bool { return true })) == before, "a registry was asked")
			problems := CheckRegistries([]string{certs, filepath.Join(certs, "none")}, "", "")
			harness.Want(t, len(problems) == 1 && strings.Contains(problems[0].Error(), want), "the start says %v", problems)
		})
	}
	writeHosts(t, certs, host, strings.ReplaceAll(`# all that there is
[host."MIRROR"]
  capabilities = ["pull", "Resolve", "push", "referrers"]
  skip_verify = true
  override_path = false
  dial_timeout = "5s"
  [host."MIRROR".header]
    x-one = "1"
    x-two = ["2", "3"]
`, "MIRROR", "http://"+mirror.host()))
	harness.Same(t, "a correct file", CheckRegistries([]string{certs}, "", ""), nil)
	pull(t, s, host+"/app:1")
	harness.Want(t, !asked.Load(), "the registry was asked in the mirror's place")
}

// Credentials that pulls will not find are said at the start.
func TestDockerConfigThatNamesNothing(t *testing.T) {
	writeHelpers(t, map[string]string{"y": ""})
	for text, want := range map[string]string{
		`{}`: "it has no credentials",
		`{"auth": {"a.example": {"auth": "dTpw"}}}`:                         "it has no credentials",
		`{"auths": {"a.example": {"auth": "dTpw"}}, "credsStore": "x"}`:     "credential helper docker-credential-x is not in PATH",
		`{"auths": {"a.example": {}}, "credHelpers": {"a.example": "y"}}`:   "",
		`{"auths": {"a.example": {"username": "u", "password": "s3cret"}}`:  "registry credentials",
		`{"auths": {"a.example": {"username": "u", "password": "s3cret"}}}`: "",
	} {
		path := filepath.Join(t.TempDir(), "config.json")
		must(t, os.WriteFile(path, []byte(text), 0o600))
		var log strings.Builder
		openStore(t, func(c *Config) { c.DockerConfig, c.Logger = path, slog.New(slog.NewTextHandler(&log, nil)) })
		said := strings.ReplaceAll(log.String(), `\"`, `"`)
		harness.Want(t, (want == "") == (said == "") && (strings.Contains(said, strings.ReplaceAll(want, `"`, `\"`)) ||
			strings.Contains(said, want)), "%s: %q, want %q", text, said, want)
		harness.Want(t, !strings.Contains(said, "s3cret"), "a password: %s", said)
	}
	none := filepath.Join(t.TempDir(), "none")
	harness.Same(t, "problems of files that are not there", len(CheckRegistries(nil, none, none)), 2)
	harness.Same(t, "problems without a verifier", len(CheckRegistries(nil, "", t.TempDir())), 1)
}
