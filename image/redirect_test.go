package image

import (
	"encoding/json"
	"net/http"
	"net/http/httptest"
	"path/filepath"
	"strings"
	"testing"
	"unicode/utf8"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/test/harness"
)

// newStranger is a host that a registry sends its clients to.
func newStranger(t *testing.T, answer http.HandlerFunc) *testRegistry {
	s := newTestRegistry(t)
	s.breakWith(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool { answer(w, r); return true })
	return s
}

// address is a host's under a name that is not the registry's.
func (r *testRegistry) address() string {
	return strings.Replace(r.proxy.URL, "127.0.0.1", "localhost", 1)
}

// shown is every header and form that a host was shown.
func (r *testRegistry) shown() (all string) {
	for _, request := range r.seen(func(seenRequest) bool { return true }) {
		all += request.shown + "\n"
	}
	return all
}

// redirectBlobs sends who asks for a blob to another host.
func redirectBlobs(to string) faultFunc {
	return onBlob("", func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		http.Redirect(w, r, to+r.URL.Path, http.StatusTemporaryRedirect)
		return true
	})
}

var everyForm = map[string]Auth{
	"password":       {Username: "user", Password: "s3cret"},
	"auth":           {Auth: encoded("user:s3cret")},
	"identity token": {IdentityToken: "s3cret"},
	"registry token": {RegistryToken: "s3cret"},
}

func checkNoSecret(t *testing.T, s *testRegistry) {
	shown := s.shown()
	for _, secret := range []string{"s3cret", encoded("user:s3cret"), "Authorization"} {
		harness.Want(t, !strings.Contains(shown, secret), "the other host was shown %q:\n%s", secret, shown)
	}
}

// attack: registries: blobs are redirected to an object store that refuses a second way to authenticate
// held: the image is pulled; the store gets no credentials and no header of hosts.toml
// field: containerd does not support registry tokens, and sends the headers of hosts.toml to the store
func TestCredentialsDoNotFollowARedirect(t *testing.T) {
	for name, auth := range everyForm {
		t.Run(name, func(t *testing.T) {
			certs := t.TempDir()
			s, registry := openStore(t, func(c *Config) { c.CertsDirs = []string{certs} }), newTestRegistry(t)
			writeHosts(t, certs, registry.host(), "[host.\"http://"+registry.host()+"\"]\n[host.\"http://"+registry.host()+"\".header]\nx-key = \"s3cret\"\n")
			store := newStranger(t, func(w http.ResponseWriter, r *http.Request) {
				if r.Header.Get("Authorization") != "" {
					http.Error(w, "Only one auth mechanism allowed", http.StatusBadRequest)
					return
				}
				_, _ = w.Write(wholeBody(registry, r))
			})
			reference := registry.push(t, "redirected:1", smallImage(t))
			registry.breakWith(redirectBlobs(store.address()))
			_, err := s.Pull(t.Context(), reference, auth, nil)
			must(t, err)
			checkNoSecret(t, store)
			mine := registry.seen(func(r seenRequest) bool { return r.authorization == "Bearer s3cret" })
			harness.Want(t, name != "registry token" || len(mine) > 0, "the registry itself was not shown its token")
		})
	}
}

// attack: registries: the target of a redirect answers 401 and requests a password, or names a token service
// held: it gets none
// field: containerd sends the password to any host that requests it, if the kubelet names no server
func TestHostThatMerelyAsksIsShownNothing(t *testing.T) {
	for name, auth := range everyForm {
		for _, scheme := range []string{`Basic realm="x"`, `Bearer realm="REALM/token",service="x"`} {
			t.Run(name+" "+scheme[:5], func(t *testing.T) {
				s, registry := openStore(t), newTestRegistry(t)
				var store *testRegistry
				store = newStranger(t, func(w http.ResponseWriter, r *http.Request) {
					w.Header().Set("WWW-Authenticate", strings.ReplaceAll(scheme, "REALM", store.address()))
					refuse(w, http.StatusUnauthorized, "your password, please")
				})
				reference := registry.push(t, "asked:1", smallImage(t))
				registry.breakWith(redirectBlobs(store.address()))
				_, err := s.Pull(t.Context(), reference, auth, nil)
				harness.Want(t, err != nil, "pulled")
				checkNoSecret(t, store)
			})
		}
	}
}

// attack: registries: the token service redirects the login to another host
// held: minicri does not send the login there
func TestLoginIsNotRedirected(t *testing.T) {
	for name, auth := range everyForm {
		if auth.RegistryToken != "" {
			continue // has no token service
		}
		t.Run(name, func(t *testing.T) {
			s, registry := openStore(t), newTestRegistry(t)
			thief := newStranger(t, func(w http.ResponseWriter, _ *http.Request) {
				_ = json.NewEncoder(w).Encode(map[string]string{"token": "good", "access_token": "good"})
			})
			service := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
				http.Redirect(w, r, thief.address()+r.URL.Path+"?"+r.URL.RawQuery, http.StatusTemporaryRedirect)
			}))
			defer service.Close()
			reference := registry.push(t, "login:1", smallImage(t))
			registry.breakWith(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
				if r.Header.Get("Authorization") == "Bearer good" {
					return false
				}
				w.Header().Set("WWW-Authenticate", `Bearer realm="`+service.URL+`/token",service="test"`)
				refuse(w, http.StatusUnauthorized, "a token, please")
				return true
			})
			_, _ = s.Pull(t.Context(), reference, auth, nil)
			checkNoSecret(t, thief)
		})
	}
}

// attack: registries: a redirect leads to a registry for which the node's config.json has a password
// held: the password is not used: it is for pulls from that registry
func TestNodesCredentialsAreNotForRedirects(t *testing.T) {
	path := filepath.Join(t.TempDir(), "config.json")
	s, registry := openStore(t, func(c *Config) { c.DockerConfig = path }), newTestRegistry(t)
	private := newStranger(t, func(w http.ResponseWriter, _ *http.Request) {
		w.Header().Set("WWW-Authenticate", `Basic realm="x"`)
		refuse(w, http.StatusUnauthorized, "your password, please")
	})
	host := strings.TrimPrefix(private.address(), "http://")
	writeFile(t, path, `{"auths": {"`+host+`": {"username": "user", "password": "s3cret"}}}`)
	reference := registry.push(t, "deputy:1", smallImage(t))
	registry.breakWith(redirectBlobs(private.address()))
	_, err := s.Pull(t.Context(), reference, Auth{}, nil)
	harness.Want(t, err != nil, "pulled")
	checkNoSecret(t, private)
}

// attack: registries: urls of a descriptor, a redirect or a token service point at a page inside the node's network
// held: urls get no request; no text of a page reaches an error
// field: containerd requests urls without a time limit, and copies 300 characters of the answer into the error, more if it has the form of a registry's error
func TestNothingOfAnotherHostsAnswerIsShown(t *testing.T) {
	for name, page := range map[string]string{
		"text":  "secret=AKIA123456789 token=abcdef",
		"json":  `{"errors":[{"code":"UNKNOWN","message":"secret=AKIA123456789 ` + strings.Repeat("x", 50000) + `"}]}`,
		"other": `{"token": 123456789, "expires_in": "AKIA123456789"}`,
	} {
		for _, status := range []int{http.StatusOK, http.StatusForbidden} {
			inside := newStranger(t, func(w http.ResponseWriter, _ *http.Request) {
				w.WriteHeader(status)
				_, _ = w.Write([]byte(page))
			})
			for way, fault := range map[string]faultFunc{
				"redirect": redirectBlobs(inside.address()),
				"manifest": func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
					http.Redirect(w, r, inside.address(), http.StatusTemporaryRedirect)
					return true
				},
				"token": func(w http.ResponseWriter, _ *http.Request, _ http.Handler) bool {
					w.Header().Set("WWW-Authenticate", `Bearer realm="`+inside.address()+`"`)
					refuse(w, http.StatusUnauthorized, "a token")
					return true
				},
			} {
				t.Run(name+" by "+way, func(t *testing.T) {
					s, registry := openStore(t), newTestRegistry(t)
					reference := registry.push(t, "inside:1", smallImage(t))
					registry.breakWith(fault)
					_, err := s.Pull(t.Context(), reference, Auth{}, nil)
					harness.Need(t, err != nil, "error: %v", err)
					harness.Want(t, !strings.Contains(err.Error(), "AKIA"), "error: %v", err)
					harness.Want(t, !strings.Contains(err.Error(), "123456"), "error: %v", err)
				})
			}
		}
	}
}

func TestURLsOfDescriptorsAreNotAsked(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	elsewhere := newStranger(t, func(http.ResponseWriter, *http.Request) {})
	manifest := registry.handmade(t)
	manifest.Layers[0].URLs, manifest.Config.URLs = []string{elsewhere.address() + "/layer"}, []string{elsewhere.address() + "/config"}
	pull(t, s, registry.name("urls:1", manifest.MediaType, manifest))
	harness.Same(t, "the address of a descriptor was asked", elsewhere.shown(), "")
}

// attack: registries: an error has 50 KB and control characters
// held: the error has at most 1 KiB of printable text
func TestErrorsAreShortAndPrintable(t *testing.T) {
	s, registry := openStore(t), newTestRegistry(t)
	reference := registry.push(t, "words:1", smallImage(t))
	for _, body := range []string{
		strings.Repeat("x\x1b[31m\x00\xff\u202e ", 10000),
		`{"errors":[{"code":"A\u001b[31mB","message":"` + strings.Repeat(`line\n\u0000`, 5000) + `"}]}`,
	} {
		registry.breakWith(onBlob("", func(w http.ResponseWriter, _ *http.Request, _ http.Handler) bool {
			w.WriteHeader(http.StatusForbidden)
			_, _ = w.Write([]byte(body))
			return true
		}))
		_, err := s.Pull(t.Context(), reference, Auth{}, nil)
		harness.Want(t, errdefs.IsPermissionDenied(err), "error of %d bytes: %q", len(err.Error()), err)
		harness.Want(t, len(err.Error()) <= 1024, "error of %d bytes: %q", len(err.Error()), err)
		harness.Want(t, utf8.ValidString(err.Error()), "error of %d bytes: %q", len(err.Error()), err)
		harness.Want(t, !strings.ContainsAny(err.Error(), "\x1b\x00\n\u202e"),
			"error of %d bytes: %q", len(err.Error()), err)
	}
}
