package image

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/http"
	"net/http/httptest"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"

	"github.com/minicri/minicri/test/harness"
)

func smallImage(t testing.TB) v1.Image { return imageOf(t, v1.Config{}, layerOf(t, file("a", "1"))) }

// demandBasic refuses requests without the login user:pass.
func demandBasic(w http.ResponseWriter, r *http.Request) bool {
	if user, pass, _ := r.BasicAuth(); user == "user" && pass == "pass" {
		return false
	}
	w.Header().Set("WWW-Authenticate", `Basic realm="test"`)
	refuse(w, http.StatusUnauthorized, "who are you")
	return true
}

func refuse(w http.ResponseWriter, code int, words string) {
	w.WriteHeader(code)
	_ = json.NewEncoder(w).Encode(map[string]any{"errors": []any{map[string]string{"code": "UNAUTHORIZED", "message": words}}})
}

func encoded(login string) string { return base64.StdEncoding.EncodeToString([]byte(login)) }

func TestForbiddenIsToldApart(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	reference := registry.push(t, "forbidden:1", smallImage(t))
	registry.breakWith(func(w http.ResponseWriter, _ *http.Request, _ http.Handler) bool {
		refuse(w, http.StatusForbidden, "not from your country")
		return true
	})
	checkRefused(t, s, reference, Auth{}, errdefs.IsPermissionDenied, "not from your country")
}

func TestHostsFileIsReadAtEachPull(t *testing.T) {
	first, second := t.TempDir(), t.TempDir()
	s := openStore(t, func(c *Config) { c.CertsDirs = []string{first, second} })
	registry := newTestRegistry(t)
	registry.push(t, "library/mirrored:1", smallImage(t))
	page := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = w.Write([]byte("<html>log in</html>")) }))
	defer page.Close() // it is no registry, so the next one counts
	mirror := `server = "http://127.0.0.1:1"
[host."` + page.URL + `"]
[host."http://` + registry.host() + `"]
  capabilities = ["pull", "resolve"]
`
	writeHosts(t, second, "docker.io", mirror)
	image := pull(t, s, "mirrored:1") // unqualified: docker.io/library
	harness.Same(t, "tags", image.RepoTags, []string{"docker.io/library/mirrored:1"})
	writeHosts(t, first, "docker.io", `server = "http://127.0.0.1:1"`)
	checkRefused(t, s, "mirrored:1", Auth{}, isUnavailable, "127.0.0.1:1") // the first directory's file counts
	writeHosts(t, first, "docker.io", fmt.Sprintf("server = %q", page.URL))
	checkRefused(t, s, "mirrored:1", Auth{}, isUnavailable, hostOfURL(page.URL)+" returned a page of HTML")
}

// TestMirrorsGetTheirOwnCredentials: what config.json has for a mirror goes
// before what the pod brought for the registry.
func TestMirrorsGetTheirOwnCredentials(t *testing.T) {
	path, certs := filepath.Join(t.TempDir(), "config.json"), t.TempDir()
	s := openStore(t, func(c *Config) { c.CertsDirs, c.DockerConfig = []string{certs}, path })
	registry := newTestRegistry(t)
	registry.push(t, "team/app:1", smallImage(t))
	registry.breakWith(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool { return demandBasic(w, r) })
	writeHosts(t, certs, "registry.example", `[host."http://`+registry.host()+`"]`)
	text := `{"auths": {"` + registry.host() + `": {"username": "user", "password": "pass"}}}`
	must(t, os.WriteFile(path, []byte(text), 0o600))
	_, err := s.Pull(t.Context(), "registry.example/team/app:1", Auth{Username: "pod", Password: "secret"}, nil)
	must(t, err)
	harness.Same(t, "the mirror was shown", registry.seen(func(r seenRequest) bool { return r.authorization == "Basic "+encoded("pod:secret") }), nil)
}

// writeHelpers puts programs docker-credential-NAME into PATH.
func writeHelpers(t *testing.T, scripts map[string]string) {
	dir := t.TempDir()
	t.Setenv("PATH", dir+":"+os.Getenv("PATH"))
	for name, script := range scripts {
		must(t, os.WriteFile(filepath.Join(dir, "docker-credential-"+name), []byte("#!/bin/sh\n"+script), 0o755))
	}
}

// TestCredentialHelpers: a program that config.json names is asked for the
// credentials of a pull that brings none, and of no other.
func TestCredentialHelpers(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.json")
	s, registry := openStore(t, func(c *Config) { c.DockerConfig = path }), newTestRegistry(t)
	reference := registry.push(t, "helper:1", smallImage(t))
	registry.breakWith(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool { return demandBasic(w, r) })
	const answer = `echo '{"Username": "user", "Secret": "pass"}'`
	writeHelpers(t, map[string]string{
		"good":   `[ "$1" = get ] && [ "$(cat)" = "` + registry.host() + `" ] && ` + answer,
		"none":   `echo credentials not found in native keychain; exit 1`,
		"broken": `echo "the vault is locked, password=s3cret"; exit 1`,
		"json":   `echo '{"Username": "user", "Secret": "s3cret"}'; exit 1`,
		"words":  `echo s3cret`,
	})
	for name, test := range map[string]struct {
		config string
		auth   Auth
		want   string // in the error
	}{
		"of the registry":     {`"credHelpers": {"` + registry.host() + `": "good"}, "credsStore": "broken"`, Auth{}, ""},
		"of all":              {`"credHelpers": {"a.example": "broken"}, "credsStore": "good"`, Auth{}, ""},
		"none, but the file":  {`"credsStore": "none", "auths": {"` + registry.host() + `": {"auth": "` + encoded("user:pass") + `"}}`, Auth{}, ""},
		"the pod's go first":  {`"credsStore": "broken"`, Auth{Username: "user", Password: "pass"}, ""},
		"no credentials":      {`"credsStore": "none"`, Auth{}, "no basic auth credentials"},
		"no such helper":      {`"credsStore": "not-there"`, Auth{}, "no basic auth credentials"},
		"broken":              {`"credsStore": "broken"`, Auth{}, "docker-credential-broken for " + registry.host() + ": exit status 1: the vault is locked"},
		"exit code with JSON": {`"credsStore": "json"`, Auth{}, "docker-credential-json for " + registry.host() + ": exit status 1"},
		"no JSON":             {`"credsStore": "words"`, Auth{}, "docker-credential-words for " + registry.host()},
	} {
		t.Run(name, func(t *testing.T) {
			must(t, os.WriteFile(path, []byte("{"+test.config+"}"), 0o600))
			_, err := s.Pull(t.Context(), reference, test.auth, nil)
			harness.Want(t, (err == nil) == (test.want == ""), "error: %v, want %q", err, test.want)
			harness.Want(t, err == nil || strings.Contains(err.Error(), test.want),
				"error: %v, want %q", err, test.want)
			harness.Want(t, err == nil || !strings.Contains(err.Error(), "s3cret"), "the error shows the secret: %v", err)
		})
	}
}

// attack: registries: a credential helper of the node hangs with a child that holds its output, or prints without end
// held: helper and children are killed after 30 s; at most 64 KiB of the output are read
func TestHelperThatHangs(t *testing.T) {
	writeHelpers(t, map[string]string{
		"hangs":  `sleep 7774 & sleep 7774`,
		"floods": `head -c 1000000 /dev/zero`,
		"token":  `[ "$(cat)" = https://index.docker.io/v1/ ] && echo '{"Username": "<token>", "Secret": "refresh"}'`,
	})
	_, err := askHelper(t.Context(), "hangs", "a.example", time.Second)
	harness.Want(t, errors.Is(err, context.DeadlineExceeded) && strings.Contains(err.Error(), "docker-credential-hangs for a.example"), "%v", err)
	harness.Eventually(t, "its children have ended", func() bool {
		return !slices.ContainsFunc(harness.Processes(), func(p harness.Process) bool { return slices.Contains(p.Args, "7774") })
	})
	_, err = askHelper(t.Context(), "floods", "a.example", helperLimit)
	harness.Want(t, errdefs.IsUnavailable(err) && len(err.Error()) <= 300, "one that floods: %v", err)
	auth, err := askHelper(t.Context(), "token", "docker.io", helperLimit)
	harness.Want(t, err == nil && auth == (Auth{IdentityToken: "refresh"}), "a token: %#v, %v", auth, err)
}

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
	"no ca":           {"[host.\"MIRROR\"]\nca = \"none.pem\"", "unable to read CA cert"},
	"no client":       {"[host.\"MIRROR\"]\nclient = [[\"none.cert\", \"none.key\"]]", "unable to read CERT file"},
	"client":          {"[host.\"MIRROR\"]\nclient = [[\"a\", \"b\", \"c\"]]", "line 2: host.MIRROR.client: "},
	"header":          {"[host.\"MIRROR\"]\n[host.\"MIRROR\".header]\nx = { y = 1 }", "line 3: host.MIRROR.header.x: "},
	"no table":        {"host = { \"MIRROR\" = { capabilities = [\"pull\"] } }", "line 1: host.MIRROR: it has to be a table of its own"},
	"an address":      {"[host.\"MIRROR\"]\n[host.\"https://\"]", `line 2: host.https://: "https://" is no address of a registry`},
	"the server":      {"server = \"httpx://x\"\n[host.\"MIRROR\"]", `line 1: server: "httpx://x" is no address of a registry`},
	"a scheme":        {"[host.\"ftp://x:1\"]", `line 1: host.ftp://x:1: "ftp://x:1" is no address of a registry`},
	"a bare server":   {"[host.\"MIRROR\"]\n[server]\nx = 1", "line "},
}

// attack: registries: a hosts.toml has a wrong value, an unknown key, or a host that is no table
// held: the pull fails with file, line and key; neither the mirror nor the registry gets a request; the daemon logs a warning at its start
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
	must(t, os.WriteFile(filepath.Join(certs, "README"), nil, 0o600))
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
		`{"auths": {"a.example": {}}}`:                                      "it has no credentials",
		`{"auths": {"a.example": {"auth": "s3cret"}}}`:                      "a.example: auth is not user:password in base64",
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
		harness.Want(t, (want == "") == (said == ""), "%s: %q, want %q", text, said, want)
		harness.Want(t, strings.Contains(said, strings.ReplaceAll(want, `"`, `\"`)) || strings.Contains(said, want),
			"%s: %q, want %q", text, said, want)
		harness.Want(t, !strings.Contains(said, "s3cret"), "a password: %s", said)
	}
	none := filepath.Join(t.TempDir(), "none")
	harness.Same(t, "problems of files that are not there", len(CheckRegistries(nil, none, none)), 2)
	harness.Same(t, "problems without a verifier", len(CheckRegistries(nil, "", t.TempDir())), 1)
}

// No error about a hosts.toml has a credential of it, whatever is wrong with the file.
//
// attack: registries: a hosts.toml has a password in an address or a header, and is wrong
// held: the error and the log have file, line and key, and no credential, whether plain, in base64 or escaped
func TestHostsFileHasItsSecretsForItself(t *testing.T) {
	const password, header = `Mellon 47"11/ü`, "h3ader-value"
	address := "https://robot:" + url.PathEscape(password) + "@mirror.example"
	raw := "https://robot:" + password + "@mirror.example"
	for _, row := range []struct{ name, text string }{
		{"unknown key in the table of an address", fmt.Sprintf("[host.%q]\ncapabilitie = []", address)},
		{"wrong value there", fmt.Sprintf("[host.%q]\ncapabilities = [\"pul\"]", address)},
		{"no table", fmt.Sprintf("host = {%q = {}}", address)},
		{"server that is no address", fmt.Sprintf("server = %q", "ftp"+address)},
		{"server that cannot be parsed", fmt.Sprintf("server = %q", raw)},
		{"host that cannot be parsed", fmt.Sprintf("[host.%q]\ncapabilities = [\"pull\"]", raw)},
		{"header of a table", fmt.Sprintf("[header]\nX-Token = {value = %q}", header)},
		{"header of nested lists", fmt.Sprintf("[host.%q.header]\nX-Token = [[%q]]", "https://mirror.example", header)},
		{"header of a list with a number", fmt.Sprintf("[header]\nAuthorization = [%q, 5]", "Basic "+header)},
		{"no TOML", fmt.Sprintf("server = %q = %q", address, header)},
	} {
		dir := t.TempDir()
		harness.Check(t, os.WriteFile(filepath.Join(dir, hostsFileName), []byte(row.text), 0o600))
		err := checkHostDir(dir)
		harness.Need(t, err != nil, "%s: it is accepted", row.name)
		for _, secret := range []string{
			password, url.PathEscape(password), strings.Trim(fmt.Sprintf("%q", password), `"`), encoded(password), header,
		} {
			harness.Want(t, !strings.Contains(err.Error(), secret), "%s: %v", row.name, err)
		}
	}
}
