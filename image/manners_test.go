package image

import (
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"net/http"
	"net/http/httptest"
	"net/url"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"testing"

	"github.com/containerd/errdefs"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	ocispec "github.com/opencontainers/image-spec/specs-go/v1"

	"github.com/minicri/minicri/test/harness"
)

func isGet(r *http.Request) bool      { return r.Method == http.MethodGet }
func isHead(r *http.Request) bool     { return r.Method == http.MethodHead }
func isManifest(r *http.Request) bool { return strings.Contains(r.URL.Path, "/manifests/") }

// status answers requests with a code; some is nil for all.
func status(code int, some func(*http.Request) bool, header ...string) faultFunc {
	return func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		if some != nil && !some(r) {
			return false
		}
		for i := 0; i < len(header); i += 2 {
			w.Header().Set(header[i], header[i+1])
		}
		w.WriteHeader(code)
		return true
	}
}

// times has a fault happen that often for each method and path.
func times(most int, fault faultFunc) faultFunc {
	var mu sync.Mutex
	seen := map[string]int{}
	return func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		mu.Lock()
		seen[r.Method+r.URL.Path]++
		again := seen[r.Method+r.URL.Path] <= most
		mu.Unlock()
		return again && fault(w, r, origin)
	}
}

// header rewrites the header of an answer.
func header(some func(*http.Request) bool, change func(http.Header)) faultFunc {
	return func(w http.ResponseWriter, r *http.Request, origin http.Handler) bool {
		if !some(r) {
			return false
		}
		answer := httptest.NewRecorder()
		origin.ServeHTTP(answer, r)
		for key, values := range answer.Header() {
			w.Header()[key] = values
		}
		change(w.Header())
		w.WriteHeader(answer.Code)
		_, _ = w.Write(answer.Body.Bytes())
		return true
	}
}

// without drops fields of a header; net/http would make up a type.
func without(names ...string) func(http.Header) {
	return func(h http.Header) {
		for _, name := range names {
			h.Del(name)
			if name == "Content-Type" {
				h[name] = nil
			}
		}
	}
}

// tokens is a registry that gives tokens: ask answers a request for one, or returns false for a common answer.
func tokens(challenge string, ask func(w http.ResponseWriter, r *http.Request) bool) faultFunc {
	return func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
		switch {
		case r.URL.Path == "/token" && ask != nil && ask(w, r):
		case r.URL.Path == "/token" && r.Method == http.MethodPost && r.PostFormValue("password") == "p s/w" &&
			r.PostFormValue("username") == "user",
			r.URL.Path == "/token" && r.Method == http.MethodGet &&
				r.Header.Get("Authorization") == "Basic "+encoded("user:p s/w"):
			_, _ = fmt.Fprint(w, `{"token": "t0ken", "access_token": "t0ken"}`)
		case r.URL.Path == "/token":
			refuse(w, http.StatusUnauthorized, "who are you")
		case r.Header.Get("Authorization") == "Bearer t0ken":
			return false
		default:
			challenges := strings.ReplaceAll(challenge, "REALM", "http://"+r.Host+"/token")
			for _, line := range strings.Split(challenges, "\n") {
				w.Header().Add("WWW-Authenticate", line)
			}
			refuse(w, http.StatusUnauthorized, "who are you")
		}
		return true
	}
}

const bearer = `Bearer realm="REALM",service="r",scope="repository:app:pull"`

// onPost answers a login by POST.
func onPost(code int, kind, body string) func(http.ResponseWriter, *http.Request) bool {
	return func(w http.ResponseWriter, r *http.Request) bool {
		if r.Method == http.MethodPost {
			w.Header().Set("Content-Type", kind)
			w.WriteHeader(code)
			_, _ = w.Write([]byte(body))
		}
		return r.Method == http.MethodPost
	}
}

// TestRegistriesAsTheyAre pulls from registries that behave as in public reports.
func TestRegistriesAsTheyAre(t *testing.T) {
	s := openStore(t, func(c *Config) { c.MaxDownloads = 1 })
	heads := func(code int) faultFunc {
		return status(code, func(r *http.Request) bool { return isHead(r) && isManifest(r) })
	}
	headOnly := func(r *http.Request) bool { return isHead(r) && isManifest(r) }
	resolves := func(r *http.Request) bool { return isManifest(r) }
	typed := func(kind string) faultFunc {
		return header(headOnly, func(h http.Header) { h.Set("Content-Type", kind) })
	}
	for _, test := range []struct {
		name  string
		fault faultFunc
	}{
		{"HEAD 400", heads(400)},
		{"HEAD 401 without a challenge", heads(401)},
		{"HEAD 403", heads(403)},
		{"HEAD 404", heads(404)},
		{"HEAD 405", heads(405)},
		{"HEAD 406", heads(406)},
		{"HEAD 429", heads(429)},
		{"HEAD 500", heads(500)},
		{"HEAD 501", heads(501)},
		{"HEAD 503", heads(503)},
		{"HEAD that ends the connection", func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if headOnly(r) {
				panic(http.ErrAbortHandler)
			}
			return false
		}},
		{"HEAD of schema 1", typed("application/vnd.docker.distribution.manifest.v1+prettyjws")},
		{"HEAD without a type", header(headOnly, without("Content-Type"))},
		{"HEAD as JSON", typed("application/json; charset=utf-8")},
		{"HEAD as text", typed("text/plain")},
		{"HEAD as HTML", typed("text/html")},
		{"HEAD as bytes", typed("application/octet-stream")},
		{"HEAD without a digest", header(headOnly, without("Docker-Content-Digest"))},
		{"HEAD with another digest", header(headOnly, func(h http.Header) { h.Set("Docker-Content-Digest", "W/1") })},
		{"HEAD without a length", header(headOnly, without("Content-Length"))},
		{"nothing at all", header(resolves, without("Content-Type", "Docker-Content-Digest", "Content-Length"))},
		{"JSON as the type", header(resolves, func(h http.Header) { h.Set("Content-Type", "application/json") })},
		{"bytes as the type", header(resolves, func(h http.Header) { h.Set("Content-Type", "binary/octet-stream") })},
		{"everything fails once with 502", times(1, status(502, nil))},
		{"once with 500", times(1, status(500, nil))},
		{"once with 504", times(1, status(504, nil))},
		{"three times with 503", times(3, status(503, nil))},
		{"three times with 429", times(3, status(429, nil, "Retry-After", "0"))},
		{"twice with 429 until a date", times(2, status(429, nil, "Retry-After", "Fri, 01 Jan 2016 00:00:00 GMT"))},
		{"once with 408", times(1, status(408, nil))},
		{"no lengths", header(isGet, without("Content-Length", "Accept-Ranges"))},
		{"relative redirects", func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			hops := r.URL.Query().Get("hop")
			if len(hops) >= 4 {
				return false
			}
			w.Header().Set("Location", "./"+r.URL.Path[strings.LastIndex(r.URL.Path, "/")+1:]+"?hop="+hops+"x")
			w.WriteHeader([]int{307, 302, 308, 301}[len(hops)])
			return true
		}},
		{"HEAD sent to what allows GET alone", func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if r.URL.RawQuery == "" {
				http.Redirect(w, r, "http://"+r.Host+r.URL.Path+"?X-Signature=GET", http.StatusTemporaryRedirect)
				return true
			}
			return isHead(r) && status(403, nil)(w, r, nil)
		}},
		{"login by GET and POST", tokens(bearer, nil)},
		{"login by POST alone", tokens(bearer, func(w http.ResponseWriter, r *http.Request) bool {
			return r.Method == http.MethodGet && status(405, nil)(w, r, nil)
		})},
		{"POST 400", tokens(bearer, onPost(400, "", ""))},
		{"POST 401", tokens(bearer, onPost(401, "", ""))},
		{"POST 403", tokens(bearer, onPost(403, "text/plain", "CSRF"))},
		{"POST 404", tokens(bearer, onPost(404, "", ""))},
		{"POST 405", tokens(bearer, onPost(405, "", ""))},
		{"POST 415", tokens(bearer, onPost(415, "", ""))},
		{"POST 422", tokens(bearer, onPost(422, "", ""))},
		{"POST 500", tokens(bearer, onPost(500, "", ""))},
		{"POST 502", tokens(bearer, onPost(502, "", ""))},
		{"POST 503", tokens(bearer, onPost(503, "", ""))},
		{"POST with HTML", tokens(bearer, onPost(200, "text/html", "<html>log in</html>"))},
		{"POST with nothing", tokens(bearer, onPost(204, "", ""))},
		{"POST with an empty object", tokens(bearer, onPost(200, "application/json", "{}"))},
		{"POST with the other name", tokens(bearer, onPost(200, "application/json", `{"token": "wrong"}`))},
		{"POST to a login page", tokens(bearer, func(w http.ResponseWriter, r *http.Request) bool {
			if r.Method == http.MethodPost {
				http.Redirect(w, r, "/login", http.StatusFound)
			}
			return r.Method == http.MethodPost
		})},
		{"the token service fails once", tokens(bearer, func() func(http.ResponseWriter, *http.Request) bool {
			once := times(1, status(503, nil))
			return func(w http.ResponseWriter, r *http.Request) bool { return once(w, r, nil) }
		}())},
		{"two challenges in one field", tokens(`Basic realm="r", `+bearer, nil)},
		{"the other order", tokens(bearer+`, Basic realm="r"`, nil)},
		{"two fields", tokens("Basic realm=\"r\"\n"+bearer, nil)},
		{"others before it", tokens("Negotiate\nNTLM\n"+bearer, nil)},
		{"no quotes", tokens(`Bearer realm=REALM,service=r`, nil)},
		{"no scope", tokens(`bearer Realm="REALM"`, nil)},
		{"a bearer without an address, and basic", func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if user, pass, _ := r.BasicAuth(); user == "user" && pass == "p s/w" {
				return false
			}
			w.Header().Set("WWW-Authenticate", `Bearer service="r", Basic realm="r"`)
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}},
		{"tokens that end after each blob", func() faultFunc {
			var current atomic.Int64
			return func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
				token := fmt.Sprint("t0ken", current.Load())
				switch {
				case r.URL.Path == "/token":
					_, _ = fmt.Fprintf(w, `{"token": %q, "access_token": %q, "expires_in": 3600}`, token, token)
				case r.Header.Get("Authorization") == "Bearer "+token:
					if strings.Contains(r.URL.Path, "/blobs/") {
						current.Add(1)
					}
					return false
				default:
					w.Header().Set("WWW-Authenticate", strings.ReplaceAll(bearer, "REALM", "http://"+r.Host+"/token"))
					w.WriteHeader(http.StatusUnauthorized)
				}
				return true
			}
		}()},
	} {
		t.Run(test.name, func(t *testing.T) {
			registry := newTestRegistry(t)
			img := imageOf(t, v1.Config{}, layerOf(t, file("a", test.name)), layerOf(t, file("b", test.name)))
			reference := registry.push(t, "app:1", img)
			registry.breakWith(test.fault)
			got, err := s.Pull(t.Context(), reference, Auth{Username: "user", Password: "p s/w"}, nil)
			harness.Want(t, err == nil && got.ID == idOf(t, img), "%v", err)
			digest := registry.host() + "/app@" + digestOf(t, img)
			_, err = s.Pull(t.Context(), digest, Auth{Username: "user", Password: "p s/w"}, nil)
			harness.Want(t, err == nil, "by digest: %v", err)
		})
	}
}

// A cache that lacks a part, sends a page, cuts a blob or wants a login does not fail the pull.
func TestMirrorsThatFail(t *testing.T) {
	certs := t.TempDir()
	s := openStore(t, func(c *Config) { c.CertsDirs = []string{certs} })
	blobs := func(r *http.Request) bool { return strings.Contains(r.URL.Path, "/blobs/") }
	for _, test := range []struct {
		name  string
		fault faultFunc
	}{
		{"no blobs", status(404, blobs)},
		{"502 for blobs", status(502, blobs)},
		{"503 for all", status(503, nil, "Retry-After", "3600")},
		{"429", status(429, nil)},
		{"403", status(403, nil)},
		{"a login", status(401, nil, "WWW-Authenticate", `Basic realm="r"`)},
		{"404", status(404, nil)},
		{"HTML", status(200, nil, "Content-Type", "text/html")},
		{"cut blobs", onBlob("", cutAfter(3))},
	} {
		t.Run(test.name, func(t *testing.T) {
			registry, mirror := newTestRegistry(t), newTestRegistry(t)
			img := imageOf(t, v1.Config{}, layerOf(t, noise(test.name, 200<<10, 7)))
			registry.push(t, "cache/app:1", img)
			mirror.push(t, "cache/app:1", img)
			mirror.breakWith(test.fault)
			writeHosts(
				t,
				certs,
				"registry.example",
				fmt.Sprintf("server = \"http://%s\"\n[host.\"http://%s\"]\n", registry.host(), mirror.host()),
			)
			pull(t, s, "registry.example/cache/app:1")
			harness.Want(t, len(mirror.seen(func(seenRequest) bool { return true })) > 0, "the mirror was not asked")
		})
	}
}

// A mirror below a path (override_path), and a registry at an address of IPv6.
func TestAddressesOfRegistries(t *testing.T) {
	certs := t.TempDir()
	s, registry := openStore(t, func(c *Config) { c.CertsDirs = []string{certs} }), newTestRegistry(t)
	registry.push(t, "team/app:1", smallImage(t))
	prefixed := httptest.NewServer(
		http.StripPrefix("/proxy/v2", http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
			r.URL.Path = "/v2" + r.URL.Path
			registry.ServeHTTP(w, r)
		})),
	)
	defer prefixed.Close()
	writeHosts(
		t,
		certs,
		"registry.example",
		fmt.Sprintf("server = \"http://127.0.0.1:1\"\n[host.\"%s/proxy/v2\"]\noverride_path = true\n", prefixed.URL),
	)
	pull(t, s, "registry.example/team/app:1")
	v6 := httptest.NewUnstartedServer(registry)
	listener, err := net.Listen("tcp6", "[::1]:0")
	must(t, err)
	v6.Listener = listener
	v6.Start()
	defer v6.Close()
	reference := strings.TrimPrefix(v6.URL, "http://") + "/team/app:1"
	got := pull(t, s, reference)
	harness.Want(t, slices.Contains(got.RepoTags, reference), "%v", got.RepoTags)
}

// TestCredentialsOfAPath: the longest path that an image's is below has the credentials, whatever the order.
func TestCredentialsOfAPath(t *testing.T) {
	keys := map[string]string{
		"H": "host", "H/org1": "org1", "H/org1/deep": "deep", "https://H/v2/org2": "org2",
		"H/org3/": "org3", "other.example": "other", "H/empty": "",
		"*.glob.example": "glob", "x.glob.example/a": "path of a glob",
	}
	for _, test := range []struct{ host, repository, want string }{
		{"H", "org1/i", "org1"},
		{"H", "org1/deep/i", "deep"},
		{"H", "org1/deeper/i", "org1"},
		{"H", "org10/i", "host"},
		{"H", "org1", "org1"},
		{"H", "org2/i", "org2"},
		{"H", "org3/i", "org3"},
		{"H", "i", "host"},
		{"H", "empty/i", "host"},
		{"other.example", "a/b", "other"},
		{"none.example", "a", ""},
		{"y.glob.example", "a", "glob"},
		{"x.glob.example", "a/b", "path of a glob"},
		{"x.glob.example", "b", "glob"},
		{"glob.example", "a", ""},
		{"a.b.glob.example", "a", ""},
	} {
		got, _ := match(keys, test.host, test.repository)
		harness.Same(t, test.host+"/"+test.repository, got, test.want)
	}
	hub := map[string]string{"https://index.docker.io/v1/": "hub", "docker.io/org": "org"}
	for repository, want := range map[string]string{"library/busybox": "hub", "org/i": "org"} {
		got, _ := match(hub, "registry-1.docker.io", repository)
		harness.Same(t, repository, got, want)
	}
	got, _ := match(map[string]string{"https://H/some/service": "address"}, "H", "org/i")
	harness.Same(t, "an address that is no repository's", got, "address")
	path := filepath.Join(t.TempDir(), "config.json")
	s, registry := openStore(t, func(c *Config) { c.DockerConfig = path }), newTestRegistry(t)
	auths := map[string]Auth{
		registry.host():        {Username: "x", Password: "x"},
		registry.host() + "/a": {Username: "user", Password: "pass"},
		registry.host() + "/b": {Username: "y", Password: "y"},
	}
	text, err := json.Marshal(map[string]any{"auths": auths})
	must(t, err)
	writeFile(t, path, string(text))
	registry.breakWith(func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool { return demandBasic(w, r) })
	pull(t, s, registry.push(t, "a/i:1", smallImage(t)))
	checkRefused(t, s, registry.push(t, "b/i:1", smallImage(t)), Auth{}, errdefs.IsUnauthorized, "images.docker_config")
}

// attack: registries: a registry, its token service or its storage repeats the request, with all secrets, in its error
// held: the error and the log have none of them, whether plain, in base64 or escaped
// field: containerd logs the answer of the token service
func TestSecretsAreInNoErrorAndNoLog(t *testing.T) {
	const password, token = "Mellon & 4711/ü", "eyJ.t0ken-of-the-service"
	basic := encoded("robot:" + password)
	secrets := []string{
		password,
		basic,
		url.QueryEscape(password),
		url.PathEscape(password),
		encoded(password),
		token,
		"h3ader-of-hosts",
		"signature-of-storage", encoded("u:storage"), "u:storage@",
	}
	echo := func(w http.ResponseWriter, r *http.Request, code int) {
		_ = r.ParseForm()
		w.Header().Set("X-Echo", r.Header.Get("Authorization"))
		w.WriteHeader(code)
		_, _ = fmt.Fprintf(
			w,
			"no: %s %v %v %s %s",
			r.Header.Get("Authorization"),
			r.PostForm,
			r.Header,
			r.PostForm.Encode(),
			url.PathEscape(password),
		)
	}
	robot := Auth{Username: "robot", Password: password}
	echoed := func(w http.ResponseWriter, r *http.Request) bool { echo(w, r, 403); return true }
	status400 := func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool { echo(w, r, 400); return true }
	for _, test := range []struct {
		name  string
		auth  Auth
		fault faultFunc
	}{
		{"token service", robot, tokens(bearer, echoed)},
		{"token service, refresh token", Auth{IdentityToken: password}, tokens(bearer, echoed)},
		{"basic", Auth{Auth: basic}, func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			w.Header().Set("WWW-Authenticate", `Basic realm="r"`)
			echo(w, r, 401)
			return true
		}},
		{"registry token", Auth{RegistryToken: password}, status400},
		{"token that was given", robot, func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if r.URL.Path == "/token" {
				_, _ = fmt.Fprintf(w, `{"access_token": %q, "token": %q}`, token, token)
				return true
			}
			w.Header().Set("WWW-Authenticate", strings.ReplaceAll(bearer, "REALM", "http://"+r.Host+"/token"))
			echo(w, r, 401)
			return true
		}},
		{"signed storage", Auth{}, func(w http.ResponseWriter, r *http.Request, _ http.Handler) bool {
			if r.URL.RawQuery == "" {
				storage := "http://u:storage@" + r.Host + r.URL.Path + "?sig=signature-of-storage"
				http.Redirect(w, r, storage, http.StatusTemporaryRedirect)
				return true
			}
			w.WriteHeader(400)
			_, _ = fmt.Fprint(w, r.URL)
			return true
		}},
	} {
		t.Run(test.name, func(t *testing.T) {
			certs, log := t.TempDir(), &lockedText{}
			logger := slog.New(slog.NewTextHandler(log, &slog.HandlerOptions{Level: slog.LevelDebug}))
			s := openStore(t, func(c *Config) { c.CertsDirs, c.Logger = []string{certs}, logger })
			registry := newTestRegistry(t)
			reference := registry.push(t, "app:1", smallImage(t))
			writeHosts(
				t,
				certs,
				registry.host(),
				fmt.Sprintf(
					"[host.\"http://%s\"]\n[host.\"http://%s\".header]\nx-key = \"h3ader-of-hosts\"\n",
					registry.host(),
					registry.host(),
				),
			)
			registry.breakWith(test.fault)
			_, err := s.Pull(t.Context(), reference, test.auth, nil)
			harness.Want(t, err != nil, "the pull succeeded")
			for _, secret := range secrets {
				harness.Want(t, !strings.Contains(err.Error(), secret), "%q is in the error: %v", secret, err)
				harness.Want(t, !strings.Contains(log.String(), secret), "%q is in the log: %s", secret, log)
			}
			harness.Want(t, strings.Contains(log.String(), "do request"), "the library's log is empty")
		})
	}
}

// The content of a manifest gives its type if the header does not.
func TestTypeOf(t *testing.T) {
	for text, want := range map[string]string{
		`{"manifests": []}`:            ocispec.MediaTypeImageIndex,
		`{"config": {}, "layers": []}`: ocispec.MediaTypeImageManifest,
		`{"mediaType": "application/vnd.oci.image.index.v1+json", "config": {}}`: ocispec.MediaTypeImageIndex,
		`{"fsLayers": []}`: "application/vnd.docker.distribution.manifest.v1+prettyjws",
		`{"mediaType": "application/x", "manifests": []}`: "said", `{}`: "said", `[]`: "said", "<html>": "said",
	} {
		harness.Same(t, text, typeOf([]byte(text), "said"), want)
	}
}

// lockedText is a log that is read while it is written.
type lockedText struct {
	mu   sync.Mutex
	text strings.Builder
}

func (l *lockedText) Write(p []byte) (int, error) {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.Write(p)
}

func (l *lockedText) String() string {
	l.mu.Lock()
	defer l.mu.Unlock()
	return l.text.String()
}
