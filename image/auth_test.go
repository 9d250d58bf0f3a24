package image

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"net/http"
	"os"
	"path/filepath"
	"slices"
	"strings"
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
	mirror := `server = "http://127.0.0.1:1"
[host."http://` + registry.host() + `"]
  capabilities = ["pull", "resolve"]
`
	writeHosts(t, second, "docker.io", mirror)
	image := pull(t, s, "mirrored:1") // unqualified: docker.io/library
	harness.Same(t, "tags", image.RepoTags, []string{"docker.io/library/mirrored:1"})
	writeHosts(t, first, "docker.io", `server = "http://127.0.0.1:1"`)
	checkRefused(t, s, "mirrored:1", Auth{}, isUnavailable, "127.0.0.1:1") // the first directory's file counts
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
			harness.Want(t, (err == nil) == (test.want == "") && (err == nil || strings.Contains(err.Error(), test.want)),
				"error: %v, want %q", err, test.want)
			harness.Want(t, err == nil || !strings.Contains(err.Error(), "s3cret"), "the error shows the secret: %v", err)
		})
	}
}

// attack: registries: a credential helper of the node that hangs, with a child that holds its output, or floods it
// held: ended with its children at half a minute; of its output 64 KiB are read
func TestHelperThatHangs(t *testing.T) {
	writeHelpers(t, map[string]string{
		"hangs":  `sleep 7774 & sleep 7774`,
		"floods": `head -c 1000000 /dev/zero`,
		"token":  `[ "$(cat)" = https://index.docker.io/v1/ ] && echo '{"Username": "<token>", "Secret": "refresh"}'`,
	})
	_, err := askHelper(t.Context(), "hangs", "a.example", time.Second)
	harness.Want(t, errors.Is(err, context.DeadlineExceeded) && strings.Contains(err.Error(), "docker-credential-hangs for a.example"), "%v", err)
	harness.Eventually(t, "its children have ended", time.Minute, func() bool {
		return !slices.ContainsFunc(harness.Processes(), func(p harness.Process) bool { return slices.Contains(p.Args, "7774") })
	})
	_, err = askHelper(t.Context(), "floods", "a.example", helperLimit)
	harness.Want(t, errdefs.IsUnavailable(err) && len(err.Error()) <= 300, "one that floods: %v", err)
	auth, err := askHelper(t.Context(), "token", "docker.io", helperLimit)
	harness.Want(t, err == nil && auth == (Auth{IdentityToken: "refresh"}), "a token: %#v, %v", auth, err)
}
