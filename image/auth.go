package image

import (
	"context"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"math"
	"net/http"
	"os/exec"
	"path"
	"slices"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/state"
)

// Auth is what a pull may show a registry; it is not kept. The first form that is set counts: registry token,
// identity token, Auth, username and password. The fields are those of an entry of a docker config.json.
type Auth struct {
	Username      string
	Password      string
	Auth          string // username:password in base64
	ServerAddress string // limits the credentials to that host; "" for the registry of the image and its mirrors
	IdentityToken string // an OAuth refresh token, changed for an access token at the token service
	RegistryToken string // a bearer token, sent as it is
}

// String keeps secrets out of logs and errors.
func (a Auth) String() string { return "credentials" }

// GoString does so for %#v.
func (a Auth) GoString() string { return "image.Auth{...}" }

// login returns what the token protocol asks for; without a user, secret is a refresh
// token. Errors leave out the decoder's, which quotes the secret's position.
func (a Auth) login() (user, secret string, err error) {
	switch {
	case a.IdentityToken != "":
		return "", a.IdentityToken, nil
	case a.Auth == "":
		return a.Username, a.Password, nil
	}
	data, err := base64.StdEncoding.DecodeString(a.Auth)
	user, secret, ok := strings.Cut(string(data), ":")
	if err != nil || !ok {
		return "", "", fmt.Errorf("auth is not user:password in base64: %w", errdefs.ErrInvalidArgument)
	}
	return user, strings.Trim(secret, "\x00"), nil
}

// hide has the values of an Auth hidden in texts.
func (a Auth) hide(secrets *redact.Secrets) {
	if user, secret, err := a.login(); err == nil {
		secrets.AddLogin(user, secret)
	}
	secrets.AddLogin(a.Username, a.Password)
	secrets.Add(a.Auth, a.IdentityToken, a.RegistryToken)
}

// credentials decide what each host is shown during one pull.
type credentials struct {
	registry   string // of the reference
	repository string // of the reference, without its registry
	request    Auth
	config     dockerConfig
	secrets    *redact.Secrets // gets each value before a host is shown it
	own        sync.Map        // the registry's host and its mirrors', not what these redirect to or name
	last       atomic.Value    // of type string: the host after which no other is asked
	shown      atomic.Value    // of type string: whose credentials a host was shown, for people
	answers    answers
}

func (c *credentials) isOwn(host string) bool {
	_, own := c.own.Load(strings.ToLower(host))
	return own
}

// forHost returns the credentials for host. The pull's are for the registry, and for
// mirrors without any in config.json. Other hosts get none, whatever they ask for.
func (c *credentials) forHost(ctx context.Context, host string) (Auth, error) {
	if !c.isOwn(host) {
		return Auth{}, nil
	}
	server := c.request.ServerAddress
	brought := c.request != (Auth{}) && (server == "" || sameHost(hostOf(server), host))
	if brought && sameHost(host, c.registry) {
		return c.show(c.request, "the request (imagePullSecrets)"), nil
	}
	configured, known, err := c.config.ask(ctx, host, c.repository)
	if err != nil || known || !brought {
		return c.show(configured, "images.docker_config"), err
	}
	return c.show(c.request, "the request (imagePullSecrets)"), nil
}

func (c *credentials) show(auth Auth, from string) Auth {
	if auth != (Auth{}) {
		c.shown.Store(from)
		auth.hide(c.secrets)
	}
	return auth
}

func (c *credentials) login(ctx context.Context, host string) (user, secret string, err error) {
	shown, err := c.forHost(ctx, host)
	if err != nil {
		return "", "", err
	}
	return shown.login()
}

// token is the registry token for host. Without one in sight it asks no helper.
func (c *credentials) token(ctx context.Context, host string) (string, error) {
	if configured, _ := match(c.config.Auths, host, c.repository); c.request.RegistryToken == "" && configured.RegistryToken == "" {
		return "", nil
	}
	shown, err := c.forHost(ctx, host)
	return shown.RegistryToken, err
}

// hostOf returns the host of a server such as https://index.docker.io/v1/ or registry:5000.
func hostOf(server string) string {
	if _, address, isURL := strings.Cut(server, "://"); isURL {
		server = address
	}
	host, _, _ := strings.Cut(server, "/")
	return host
}

// sameHost knows that Docker Hub has three names.
func sameHost(a, b string) bool { return strings.EqualFold(canonicalHost(a), canonicalHost(b)) }

func canonicalHost(host string) string {
	if host == "registry-1.docker.io" || host == "index.docker.io" {
		return "docker.io"
	}
	return host
}

// authorizer shows credentials to one host. Hosts that it redirects to get a second authorizer, which has none.
type authorizer struct {
	host      string
	token     string // a registry token, sent as it is; "" for the token protocol
	shown     docker.Authorizer
	elsewhere docker.Authorizer
	secrets   *redact.Secrets
}

// Authorize is asked for each request and for each redirect of it.
func (a authorizer) Authorize(ctx context.Context, req *http.Request) (err error) {
	switch {
	case !strings.EqualFold(req.URL.Host, a.host) || !sameOrigin(req, firstOf(req)):
		keepPlainHeaders(req.Header)
		err = a.elsewhere.Authorize(ctx, req)
	case a.token != "":
		req.Header.Set("Authorization", "Bearer "+a.token)
	default:
		err = a.shown.Authorize(ctx, req)
	}
	if _, value, _ := strings.Cut(req.Header.Get("Authorization"), " "); value != "" {
		a.secrets.Add(value) // a token of the token service, too
	}
	return err
}

// AddResponses takes a refusal to the authorizer of the host that it came from.
func (a authorizer) AddResponses(ctx context.Context, responses []*http.Response) error {
	last := responses[len(responses)-1]
	from := last.Request.URL.Host
	last.Header["Www-Authenticate"] = challengesOf(last.Header)
	if err := refused(responses, a.secrets); err != nil {
		return fmt.Errorf("%s %s: %w", last.Request.Method, withoutQuery(last.Request.URL.String()), err)
	}
	switch {
	case !strings.EqualFold(from, a.host):
		return a.elsewhere.AddResponses(ctx, responses)
	case a.token != "":
		return fmt.Errorf("registry %s refused the registry token: %w", from, docker.ErrInvalidAuthorization)
	}
	return a.shown.AddResponses(ctx, responses)
}

// refused returns an error if a login, or a token that is as fresh as it can be, was not accepted: the library would
// repeat it. A token that was accepted before has ended; the library drops it if the challenge says so.
func refused(responses []*http.Response, secrets *redact.Secrets) error {
	last := responses[len(responses)-1]
	shown := last.Request.Header.Get("Authorization")
	scheme, _, _ := strings.Cut(shown, " ")
	again := slices.ContainsFunc(responses[:len(responses)-1], func(earlier *http.Response) bool {
		return earlier.StatusCode == http.StatusUnauthorized && sameOrigin(earlier.Request, last.Request)
	})
	switch {
	case shown == "":
		return nil
	case strings.EqualFold(scheme, "Bearer") && !again:
		for i, one := range last.Header["Www-Authenticate"] {
			if strings.HasPrefix(one, "bearer ") && !strings.Contains(one, `error="`) {
				last.Header["Www-Authenticate"][i] = one + `, error="invalid_token"`
			}
		}
		return nil
	}
	return fmt.Errorf("%s%s: %w", last.Status, wordsOf(readAgain(last), secrets), docker.ErrInvalidAuthorization)
}

// dockerConfig is the part of a docker config.json that says where credentials are.
// https://docs.docker.com/reference/cli/docker/login/
type dockerConfig struct {
	Auths       map[string]Auth   `json:"auths"`
	CredHelpers map[string]string `json:"credHelpers"` // by registry
	CredsStore  string            `json:"credsStore"`  // the helper of all others
}

// checkDockerConfig returns what pulls will miss in a file that is configured.
func checkDockerConfig(path string) error {
	config, err := readDockerConfig(path)
	if path == "" || err != nil {
		return err
	}
	for _, name := range append(slices.Sorted(maps.Values(config.CredHelpers)), config.CredsStore) {
		if _, err := exec.LookPath(helperPrefix + name); name != "" && err != nil {
			return fmt.Errorf("registry credentials %s: credential helper %s%s is not in PATH", path, helperPrefix, name)
		}
	}
	for _, host := range slices.Sorted(maps.Keys(config.Auths)) {
		if _, _, err := config.Auths[host].login(); err != nil {
			return fmt.Errorf("registry credentials %s: %s: %w", path, host, err)
		}
	}
	maps.DeleteFunc(config.Auths, func(_ string, one Auth) bool { return one == Auth{} }) // docker's mark that a helper has them
	if len(config.Auths) == 0 && len(config.CredHelpers) == 0 && config.CredsStore == "" {
		return fmt.Errorf("registry credentials %s: it has no credentials: nothing is below auths, no helper is named, or it is not there", path)
	}
	return nil
}

// readDockerConfig runs at each pull. A file that is not there has no credentials.
func readDockerConfig(path string) (config dockerConfig, err error) {
	data, err := state.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return config, nil
	}
	if err != nil {
		return config, fmt.Errorf("read registry credentials: %w", err)
	}
	if err := json.Unmarshal(data, &config); err != nil {
		return config, fmt.Errorf("read registry credentials %s: %w: %w", path, err, errdefs.ErrFailedPrecondition)
	}
	return config, nil
}

// match returns the entry for a repository of a host. Keys are a host, as docker login stores it, or a host and the
// beginning of a repository's path; the longest path counts (containers-auth.json(5), and the kubelet's config.json,
// where a host may have the wildcards of a glob). An address with another path counts for its host, last of all.
func match[T comparable](all map[string]T, host, repository string) (found T, known bool) {
	best := math.MinInt
	for _, key := range slices.Sorted(maps.Keys(all)) {
		server := hostOf(key)
		_, rest, isURL := strings.Cut(key, "://")
		if !isURL {
			rest = key
		}
		below := strings.Trim(strings.TrimPrefix(rest, server), "/")
		if version, rest, _ := strings.Cut(below, "/"); version == "v1" || version == "v2" {
			below = rest
		}
		rank, exact := 2*len(below), sameHost(server, host)
		switch {
		case all[key] == *new(T), !exact && !sameGlob(server, host):
			continue
		case below != "" && repository != below && !strings.HasPrefix(repository, below+"/"):
			if !isURL {
				continue
			}
			rank = -2
		}
		if exact {
			rank++
		}
		if rank > best {
			best, found, known = rank, all[key], true
		}
	}
	return found, known
}

// sameGlob has a wildcard stand for a part of a name between dots, as the kubelet has it.
func sameGlob(pattern, host string) bool {
	globs, names := strings.Split(pattern, "."), strings.Split(host, ".")
	return strings.Contains(pattern, "*") && len(globs) == len(names) && !slices.ContainsFunc(globs, func(glob string) bool {
		matched, err := path.Match(glob, names[0])
		names = names[1:]
		return err != nil || !matched
	})
}

// ask returns the credentials for a repository of host, those of a helper before the file's.
func (c dockerConfig) ask(ctx context.Context, host, repository string) (Auth, bool, error) {
	name, known := match(c.CredHelpers, host, repository)
	if !known {
		name = c.CredsStore
	}
	if name != "" {
		auth, err := askHelper(ctx, name, canonicalHost(host), helperLimit)
		if err != nil || auth != (Auth{}) {
			return auth, true, err
		}
	}
	auth, known := match(c.Auths, host, repository)
	return auth, known, nil
}

const (
	helperPrefix = "docker-credential-"
	helperLimit  = 30 * time.Second // some helpers ask a service
	helperRest   = time.Second      // after its end for its output, which a child may hold open
)

// askHelper runs a credential helper; one that is not installed has no credentials.
// https://docs.docker.com/reference/cli/docker/login/#credential-helper-protocol
func askHelper(ctx context.Context, name, host string, limit time.Duration) (Auth, error) {
	server := host
	if host == "docker.io" {
		server = "https://index.docker.io/v1/" // as docker login stores it
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	var said process.Said
	command := exec.CommandContext(ctx, helperPrefix+name, "get")
	command.Stdin, command.Stdout = strings.NewReader(server), &said
	command.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	command.Cancel = func() error { return syscall.Kill(-command.Process.Pid, syscall.SIGKILL) } // with its children
	command.WaitDelay = helperRest
	err := command.Run()
	text := strings.TrimSpace(said.String())
	var answer struct{ Username, Secret string }
	switch {
	case errors.Is(err, exec.ErrNotFound), err != nil && text == "credentials not found in native keychain":
		return Auth{}, nil
	case ctx.Err() != nil:
		err = ctx.Err()
	case err == nil && json.Unmarshal([]byte(text), &answer) != nil:
		err = errors.New("its answer is not the JSON of a credential helper") // the decoder's error quotes it
	case err != nil && !strings.ContainsAny(text, "{}"): // else an answer, with the secret
		err = fmt.Errorf("%w: %s", err, cut(redact.Text(text), 200))
	}
	if err != nil {
		return Auth{}, fmt.Errorf("credential helper %s%s for %s: %w: %w", helperPrefix, name, host, err, errdefs.ErrUnavailable)
	}
	if answer.Username == "<token>" {
		return Auth{IdentityToken: answer.Secret}, nil
	}
	return Auth{Username: answer.Username, Password: answer.Secret}, nil
}
