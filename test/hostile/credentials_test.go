package hostile

import (
	"encoding/base64"
	"net/http"
	"strings"
	"sync"
	"testing"

	ocispec "github.com/opencontainers/image-spec/specs-go/v1"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
)

// guard answers as a registry and its token server do that let in who shows the
// password, the registry token, or a token that was got for the identity token.
type guard struct {
	mu    sync.Mutex
	realm string // Bearer with it as realm; Basic without
	shown []string
}

const (
	password      = "Basic dXNlcjpzM2NyZXQ=" // user:s3cret
	registryToken = "Bearer registry-token"
	accessToken   = "Bearer access-token"
)

func (g *guard) hook(w http.ResponseWriter, r *http.Request) (answered bool) {
	g.mu.Lock()
	defer g.mu.Unlock()
	if r.URL.Path == "/token" {
		_ = r.ParseForm()
		g.shown = append(g.shown, "identity "+r.PostForm.Get("refresh_token"))
		if r.PostForm.Get("refresh_token") != "identity-token" {
			w.WriteHeader(http.StatusUnauthorized)
			return true
		}
		_, _ = w.Write([]byte(`{"access_token":"access-token"}`))
		return true
	}
	sent := r.Header.Get("Authorization")
	if sent != "" {
		g.shown = append(g.shown, sent)
	}
	if sent == registryToken || sent == accessToken || sent == password && g.realm == "" {
		return false
	}
	challenge := `Basic realm="registry"`
	if g.realm != "" {
		challenge = `Bearer realm="` + g.realm + `",service="registry"`
	}
	w.Header().Set("WWW-Authenticate", challenge)
	w.WriteHeader(http.StatusUnauthorized)
	return true
}

// reset begins a pull; seen are the credentials that it has shown.
func (g *guard) reset(realm string) {
	g.mu.Lock()
	defer g.mu.Unlock()
	g.realm, g.shown = realm, nil
}

func (g *guard) seen() string {
	g.mu.Lock()
	defer g.mu.Unlock()
	return strings.Join(g.shown, ", ")
}

// Each form of credentials that the CRI has opens the registry that asks for it,
// wrong ones open none, and those of another server are not shown.
//
// cri: AuthConfig.auth AuthConfig.identity_token AuthConfig.password AuthConfig.registry_token
// cri: AuthConfig.server_address AuthConfig.username PullImageRequest.auth PullImageResponse.image_ref
func TestCredentialsOfAPull(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox() // makes the directories of the image store
	content, host := newRegistry(t, n)
	m := content.Image(ocispec.ImageConfig{}, registry.Layer(registry.File("a", 0o644, "x")))
	content.Manifest("private:1", m.MediaType, m)
	g := &guard{}
	content.Answer(g.hook)
	realm := "http://" + host + "/token"
	for _, test := range []struct {
		name, realm string
		auth        *runtimeapi.AuthConfig
		opens       bool
		shown       string
	}{
		{"none", "", nil, false, ""},
		{"username and password", "", &runtimeapi.AuthConfig{Username: "user", Password: "s3cret"}, true, password},
		{"a wrong password", "", &runtimeapi.AuthConfig{Username: "user", Password: "wrong"}, false, "Basic "},
		{"auth", "", &runtimeapi.AuthConfig{Auth: base64.StdEncoding.EncodeToString([]byte("user:s3cret"))}, true, password},
		{"this server's", "", &runtimeapi.AuthConfig{Username: "user", Password: "s3cret", ServerAddress: "http://" + host}, true, password},
		{"another server's", "", &runtimeapi.AuthConfig{Username: "user", Password: "s3cret", ServerAddress: "another.example"}, false, ""},
		{"registry token", realm, &runtimeapi.AuthConfig{RegistryToken: "registry-token"}, true, registryToken},
		{"identity token", realm, &runtimeapi.AuthConfig{IdentityToken: "identity-token"}, true, "identity identity-token, " + accessToken},
		{"a wrong identity token", realm, &runtimeapi.AuthConfig{IdentityToken: "wrong"}, false, "identity wrong"},
	} {
		t.Run(test.name, func(t *testing.T) {
			g.reset(test.realm)
			id, err := pull(t, n, host+"/private:1", test.auth)
			if opened := err == nil && id == m.Config.Digest.String(); opened != test.opens {
				t.Errorf("image %q, error %v", id, err)
			}
			if seen := g.seen(); (seen == "") != (test.shown == "") || !strings.HasPrefix(seen, test.shown) {
				t.Errorf("the registry was shown %q, want %q", seen, test.shown)
			}
			if err != nil && strings.Contains(err.Error(), "s3cret") {
				t.Errorf("the error has the password: %v", err)
			}
			_, err = n.Image.RemoveImage(limited(t), &runtimeapi.RemoveImageRequest{Image: &runtimeapi.ImageSpec{Image: host + "/private:1"}})
			check(t, err)
		})
	}
}
