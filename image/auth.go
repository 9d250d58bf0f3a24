package image

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"slices"
	"strings"
	"sync"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/state"
)

// Auth is what a pull may show a registry. It is used for the pull and not kept.
// The first form that is set counts: registry token, identity token, Auth,
// username and password.
type Auth struct {
	Username string
	Password string
	// Auth is username:password in base64.
	Auth string
	// ServerAddress limits the credentials to that host. Empty: the registry of
	// the image and its mirrors.
	ServerAddress string
	// IdentityToken is an OAuth refresh token, changed for an access token at
	// the registry's token service.
	IdentityToken string
	// RegistryToken is a bearer token, sent as it is.
	RegistryToken string
}

// String keeps secrets out of logs and errors.
func (a Auth) String() string { return "credentials" }

// GoString does so for %#v.
func (a Auth) GoString() string { return "image.Auth{...}" }

// login is what the token protocol asks for; an empty user makes secret a
// refresh token.
type login struct{ user, secret string }

// login reads the form in use. Auth that is not base64 of user:password is an
// ErrInvalidArgument.
func (a Auth) login() (login, error) {
	switch {
	case a.IdentityToken != "":
		return login{secret: a.IdentityToken}, nil
	case a.Auth != "":
		return decodeAuth(a.Auth)
	}
	return login{user: a.Username, secret: a.Password}, nil
}

func decodeAuth(text string) (login, error) {
	data, err := base64.StdEncoding.DecodeString(text)
	if err != nil {
		// The decoder's error is left out: it quotes the secret's position.
		return login{}, fmt.Errorf("auth is not base64: %w", errdefs.ErrInvalidArgument)
	}
	user, secret, ok := strings.Cut(string(data), ":")
	if !ok {
		return login{}, fmt.Errorf("auth is not user:password: %w", errdefs.ErrInvalidArgument)
	}
	return login{user: user, secret: strings.Trim(secret, "\x00")}, nil
}

// credentials decide what each host is shown during one pull.
type credentials struct {
	registry string // of the reference
	request  Auth
	config   dockerConfig
	own      *ownHosts
}

// ownHosts are the hosts that a pull's configuration names: the registry's and
// its mirrors'. What they redirect to, or name in an answer, is not one of them.
type ownHosts struct {
	mu    sync.Mutex // guards names
	names map[string]bool
}

func newOwnHosts() *ownHosts { return &ownHosts{names: map[string]bool{}} }

func (o *ownHosts) add(host string) {
	o.mu.Lock()
	defer o.mu.Unlock()
	o.names[strings.ToLower(host)] = true
}

func (o *ownHosts) has(host string) bool {
	o.mu.Lock()
	defer o.mu.Unlock()
	return o.names[strings.ToLower(host)]
}

// forHost returns the credentials for host. A mirror that the node's config.json
// knows gets those; the pull's are for the registry, and for mirrors which the
// node's administrator set without credentials of their own. A host that is
// neither is shown none, whatever it asks for.
func (c credentials) forHost(host string) Auth {
	if !c.own.has(host) {
		return Auth{}
	}
	configured, known := c.config.lookup(host)
	if known && !sameHost(host, c.registry) {
		return configured
	}
	if c.request != (Auth{}) && c.request.allows(host) {
		return c.request
	}
	return configured
}

func (c credentials) login(host string) (user, secret string, err error) {
	l, err := c.forHost(host).login()
	return l.user, l.secret, err
}

// allows applies ServerAddress.
func (a Auth) allows(host string) bool {
	return a.ServerAddress == "" || sameHost(hostOf(a.ServerAddress), host)
}

// hostOf takes the host out of what config.json and the kubelet call a server:
// https://index.docker.io/v1/, registry:5000, registry.
func hostOf(server string) string {
	if strings.Contains(server, "://") {
		if u, err := url.Parse(server); err == nil {
			return u.Host
		}
	}
	host, _, _ := strings.Cut(server, "/")
	return host
}

// sameHost knows that Docker Hub has three names.
func sameHost(a, b string) bool { return strings.EqualFold(canonicalHost(a), canonicalHost(b)) }

func canonicalHost(host string) string {
	switch host {
	case "registry-1.docker.io", "index.docker.io":
		return "docker.io"
	}
	return host
}

// authorizer keeps credentials with the host that they are for. Where that host
// redirects to, a second authorizer answers, which has none.
type authorizer struct {
	host      string
	shown     docker.Authorizer
	elsewhere docker.Authorizer
}

// Authorize is asked for each request and for each redirect of it.
func (a authorizer) Authorize(ctx context.Context, req *http.Request) error {
	if strings.EqualFold(req.URL.Host, a.host) && sameOrigin(req, firstOf(req)) {
		return a.shown.Authorize(ctx, req)
	}
	keepPlainHeaders(req.Header)
	return a.elsewhere.Authorize(ctx, req)
}

// AddResponses takes a refusal to the authorizer of the host that it came from.
func (a authorizer) AddResponses(ctx context.Context, responses []*http.Response) error {
	if strings.EqualFold(responses[len(responses)-1].Request.URL.Host, a.host) {
		return a.shown.AddResponses(ctx, responses)
	}
	return a.elsewhere.AddResponses(ctx, responses)
}

// tokenAuthorizer sends a registry token as it is.
type tokenAuthorizer struct{ token string }

func (t tokenAuthorizer) Authorize(_ context.Context, req *http.Request) error {
	req.Header.Set("Authorization", "Bearer "+t.token)
	return nil
}

func (t tokenAuthorizer) AddResponses(_ context.Context, responses []*http.Response) error {
	host := responses[len(responses)-1].Request.URL.Host
	return fmt.Errorf("registry %s refused the registry token: %w", host, docker.ErrInvalidAuthorization)
}

// dockerConfig is the part of a docker config.json that holds credentials.
// https://docs.docker.com/reference/cli/docker/login/
type dockerConfig struct {
	Auths map[string]dockerAuth `json:"auths"`
	// Programs that hold credentials are not asked.
	CredsStore  string            `json:"credsStore"`
	CredHelpers map[string]string `json:"credHelpers"`
}

// checkDockerConfig returns what pulls will not find in the file, although somebody
// has configured it.
func checkDockerConfig(path string) error {
	config, err := readDockerConfig(path)
	if path == "" || err != nil {
		return err
	}
	var problems []string
	if config.CredsStore != "" || len(config.CredHelpers) > 0 {
		problems = append(problems, "credsStore and credHelpers are not supported, only credentials below auths are used")
	}
	if len(config.Auths) == 0 {
		problems = append(problems, "it has no credentials: nothing is below auths, or it is not there")
	}
	for server, auth := range config.Auths {
		if _, err := auth.auth().login(); err != nil || auth == (dockerAuth{}) {
			problems = append(problems, fmt.Sprintf("%q has no credentials that can be read", server))
		}
	}
	if len(problems) == 0 {
		return nil
	}
	slices.Sort(problems)
	return fmt.Errorf("registry credentials %s: %s", path, strings.Join(problems, "; "))
}

type dockerAuth struct {
	Username      string `json:"username"`
	Password      string `json:"password"`
	Auth          string `json:"auth"`
	IdentityToken string `json:"identitytoken"`
	RegistryToken string `json:"registrytoken"`
}

func (a dockerAuth) auth() Auth {
	return Auth{
		Username: a.Username, Password: a.Password, Auth: a.Auth,
		IdentityToken: a.IdentityToken, RegistryToken: a.RegistryToken,
	}
}

// readDockerConfig is called at each pull, so that a changed file counts at
// once. No path and no file are no credentials.
func readDockerConfig(path string) (dockerConfig, error) {
	if path == "" {
		return dockerConfig{}, nil
	}
	data, err := state.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return dockerConfig{}, nil
	}
	if err != nil {
		return dockerConfig{}, fmt.Errorf("read registry credentials: %w", err)
	}
	var config dockerConfig
	if err := json.Unmarshal(data, &config); err != nil {
		return dockerConfig{}, fmt.Errorf("read registry credentials %s: %w: %w", path, err, errdefs.ErrFailedPrecondition)
	}
	return config, nil
}

func (c dockerConfig) lookup(host string) (Auth, bool) {
	for server, a := range c.Auths {
		if sameHost(hostOf(server), host) {
			return a.auth(), true
		}
	}
	return Auth{}, false
}
