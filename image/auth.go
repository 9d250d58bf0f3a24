package image

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net/http"
	"net/url"
	"os/exec"
	"slices"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/state"
)

// Auth is what a pull may show a registry. It is used for the pull and not kept.
// The first form that is set counts: registry token, identity token, Auth,
// username and password. An entry of a docker config.json has these fields, in small
// letters.
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
type ownHosts struct{ names sync.Map }

func (o *ownHosts) add(host string) { o.names.Store(strings.ToLower(host), true) }

func (o *ownHosts) has(host string) bool {
	_, own := o.names.Load(strings.ToLower(host))
	return own
}

// forHost returns the credentials for host. A mirror that the node's config.json
// knows gets those; the pull's are for the registry, and for mirrors which the
// node's administrator set without credentials of their own. A host that is
// neither is shown none, whatever it asks for.
func (c credentials) forHost(ctx context.Context, host string) (Auth, error) {
	if !c.own.has(host) {
		return Auth{}, nil
	}
	brought := c.request != (Auth{}) && c.request.allows(host)
	if brought && sameHost(host, c.registry) {
		return c.request, nil
	}
	configured, known, err := c.config.ask(ctx, host)
	if brought && !known && err == nil {
		return c.request, nil
	}
	return configured, err
}

func (c credentials) login(ctx context.Context, host string) (user, secret string, err error) {
	shown, err := c.forHost(ctx, host)
	if err != nil {
		return "", "", err
	}
	l, err := shown.login()
	return l.user, l.secret, err
}

// token is the registry token for host. Without one in sight no helper is asked: most
// pulls need no credentials.
func (c credentials) token(ctx context.Context, host string) (string, error) {
	if configured, _ := c.config.lookup(host); c.request.RegistryToken == "" && configured.RegistryToken == "" {
		return "", nil
	}
	shown, err := c.forHost(ctx, host)
	return shown.RegistryToken, err
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

// dockerConfig is the part of a docker config.json that says where credentials are.
// https://docs.docker.com/reference/cli/docker/login/
type dockerConfig struct {
	Auths map[string]Auth `json:"auths"`
	// CredHelpers names the credential helpers of registries, CredsStore that of
	// all others.
	CredHelpers map[string]string `json:"credHelpers"`
	CredsStore  string            `json:"credsStore"`
}

// checkDockerConfig returns what pulls will not find in the file, although somebody
// has configured it.
func checkDockerConfig(path string) error {
	config, err := readDockerConfig(path)
	if path == "" || err != nil {
		return err
	}
	var problems []string
	helpers := slices.Sorted(maps.Values(config.CredHelpers))
	for _, name := range slices.Compact(append(helpers, config.CredsStore)) {
		if _, err := exec.LookPath(helperPrefix + name); name != "" && err != nil {
			problems = append(problems, fmt.Sprintf("credential helper %s%s is not in PATH", helperPrefix, name))
		}
	}
	if len(config.Auths) == 0 && len(helpers) == 0 && config.CredsStore == "" {
		problems = append(problems, "it has no credentials: nothing is below auths, no helper is named, or it is not there")
	}
	for server, auth := range config.Auths {
		// docker login leaves an empty entry for what it gave to a helper.
		if _, err := auth.login(); err != nil || auth == (Auth{}) && config.helper(hostOf(server)) == "" {
			problems = append(problems, fmt.Sprintf("%q has no credentials that can be read", server))
		}
	}
	if len(problems) == 0 {
		return nil
	}
	slices.Sort(problems)
	return fmt.Errorf("registry credentials %s: %s", path, strings.Join(problems, "; "))
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
			return a, true
		}
	}
	return Auth{}, false
}

// ask returns the credentials for host: those that a helper has, or else the file's.
func (c dockerConfig) ask(ctx context.Context, host string) (Auth, bool, error) {
	if name := c.helper(host); name != "" {
		auth, err := askHelper(ctx, name, canonicalHost(host), helperLimit)
		if err != nil || auth != (Auth{}) {
			return auth, true, err
		}
	}
	auth, known := c.lookup(host)
	return auth, known, nil
}

// helper names the credential helper for host, "" if there is none.
func (c dockerConfig) helper(host string) string {
	for server, name := range c.CredHelpers {
		if sameHost(hostOf(server), host) {
			return name
		}
	}
	return c.CredsStore
}

const (
	helperPrefix = "docker-credential-"
	// helperLimit is how long a helper may take: some ask a service.
	helperLimit = 30 * time.Second
)

// askHelper runs a credential helper
// (https://docs.docker.com/reference/cli/docker/login/#credential-helper-protocol).
// One that is not installed has no credentials.
func askHelper(ctx context.Context, name, host string, limit time.Duration) (Auth, error) {
	program, err := exec.LookPath(helperPrefix + name)
	if errors.Is(err, exec.ErrNotFound) {
		return Auth{}, nil
	}
	server := host
	if host == "docker.io" {
		server = "https://index.docker.io/v1/" // as docker login stores it
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var said process.Said
	if err == nil {
		command := exec.CommandContext(ctx, program, "get")
		command.Stdin, command.Stdout = strings.NewReader(server), &said
		command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
		command.Cancel = func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGKILL) } // with its children
		command.WaitDelay = time.Second
		err = command.Run()
	}
	text := strings.TrimSpace(said.String())
	var answer struct{ Username, Secret string }
	switch {
	case ctx.Err() != nil:
		err = ctx.Err()
	case err != nil && text == "credentials not found in native keychain":
		return Auth{}, nil
	case err != nil && !strings.ContainsAny(text, "{}"): // else an answer, with the secret
		err = fmt.Errorf("%w: %s", err, cut(redact.Text(text), 200))
	case err == nil && json.Unmarshal([]byte(text), &answer) != nil:
		err = errors.New("its answer is not the JSON of a credential helper") // the decoder's error quotes it
	}
	switch {
	case err != nil:
		return Auth{}, fmt.Errorf("credential helper %s%s for %s: %w: %w", helperPrefix, name, host, err, errdefs.ErrUnavailable)
	case answer.Username == "<token>":
		return Auth{IdentityToken: answer.Secret}, nil
	}
	return Auth{Username: answer.Username, Password: answer.Secret}, nil
}
