package image

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/errdefs"
	"github.com/distribution/reference"
	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"

	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/state"
)

const hostsFileName = "hosts.toml"

// hostsFile is all that a hosts.toml may have in it
// (https://github.com/containerd/containerd/blob/main/docs/hosts.md).
type hostsFile struct {
	hostFields
	Server string                `toml:"server"`
	Hosts  map[string]hostFields `toml:"host"`
}

type hostFields struct {
	Capabilities []string       `toml:"capabilities"`
	CA           any            `toml:"ca"`     // file, or [file...]
	Client       any            `toml:"client"` // file, or [file or [file, file]...]
	SkipVerify   *bool          `toml:"skip_verify"`
	Header       map[string]any `toml:"header"` // value, or [value...]
	OverridePath bool           `toml:"override_path"`
	DialTimeout  string         `toml:"dial_timeout"`
}

// checkHostDir refuses certificates that cannot be read, and a hosts.toml that is not understood whole, by line and
// key. The library would ignore it and ask the registry itself, which the file may be there to prevent.
func checkHostDir(dir string) error {
	path := filepath.Join(dir, hostsFileName)
	data, err := state.ReadFile(path)
	secrets := loginsOf(data)
	if err == nil {
		err = checkHosts(data)
	}
	if errors.Is(err, fs.ErrNotExist) { // certificates and keys count without it
		path, err = dir, nil
	}
	if err == nil {
		_, err = config.ConfigureHosts(context.Background(), config.HostOptions{HostDir: func(string) (string, error) { return dir, nil }})("localhost")
	}
	if err != nil {
		text := redact.Text(secrets.Text(err.Error()))
		return fmt.Errorf("registry configuration %s: %s: %w", path, text, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// loginsOf returns the logins in the addresses of a file, also of one that is no TOML.
func loginsOf(data []byte) *redact.Secrets {
	secrets := new(redact.Secrets)
	for _, found := range login.FindAllSubmatch(data, -1) {
		written := string(found[1])
		for _, text := range []string{written, unescaped(written), unquoted(written)} {
			user, password, _ := strings.Cut(text, ":")
			secrets.AddLogin(user, password)
		}
	}
	return secrets
}

var login = regexp.MustCompile(`://([^\n]*)@`)

func unquoted(text string) string {
	if plain, err := strconv.Unquote(`"` + text + `"`); err == nil { // as in TOML
		return plain
	}
	return text
}

func unescaped(text string) string {
	if plain, err := url.PathUnescape(text); err == nil {
		return plain
	}
	return text
}

func checkHosts(data []byte) error {
	var file hostsFile
	if err := toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields().Decode(&file); err != nil {
		return positioned(err)
	}
	var problems []error
	lines, tables := linesOf(data)
	check := func(err error, key ...string) {
		if err == nil {
			return
		}
		line := 1
		for i := range key { // of the key, or of the nearest table above it
			line = max(line, lines[strings.Join(key[:i+1], "\x00")+"\x00"])
		}
		problems = append(problems, fmt.Errorf("line %d: %s: %w", line, strings.Join(key, "."), err))
	}
	check(checkServer(file.Server), "server")
	file.check(nil, check)
	for name, fields := range file.Hosts {
		if !tables[name] || name == "" { // the library sees headers of tables alone
			check(fmt.Errorf("it has to be a table of its own, under [host.%q]", cmp.Or(name, "https://ADDRESS")), "host", name)
		}
		check(checkServer(name), "host", name)
		fields.check([]string{"host", name}, check)
	}
	return errors.Join(problems...)
}

// positioned puts line and key before what the decoder says.
func positioned(err error) error {
	wrong, _ := errors.AsType[*toml.DecodeError](err)
	if unknown, ok := errors.AsType[*toml.StrictMissingError](err); ok {
		wrong, err = &unknown.Errors[0], errors.New("there is no such key")
	}
	if wrong == nil {
		return err
	}
	line, _ := wrong.Position()
	return fmt.Errorf("line %d: %s: %w", line, strings.Join(wrong.Key(), "."), err)
}

func (f hostFields) check(table []string, check func(err error, key ...string)) {
	key := func(name ...string) []string { return slices.Concat(table, name) }
	known := []string{"pull", "resolve", "push", "referrers"}
	unknown := func(one string) bool { return !slices.Contains(known, strings.ToLower(one)) }
	if i := slices.IndexFunc(f.Capabilities, unknown); i >= 0 {
		check(fmt.Errorf("%q is none of pull, resolve, push and referrers", f.Capabilities[i]), key("capabilities")...)
	}
	check(checkTexts(f.CA, false), key("ca")...)
	check(checkTexts(f.Client, true), key("client")...)
	if timeout, err := time.ParseDuration(f.DialTimeout); f.DialTimeout != "" && timeout <= 0 {
		check(cmp.Or(err, fmt.Errorf("%s is no time", f.DialTimeout)), key("dial_timeout")...)
	}
	for name, value := range f.Header {
		if checkTexts(value, false) != nil { // without the value: it may be a secret
			check(errors.New("it is neither a text nor a list of texts"), key("header", name)...)
		}
	}
}

func checkServer(server string) error {
	if server == "" {
		return nil
	}
	address := server
	if !strings.HasPrefix(address, "http") { // as the library has it
		address = "https://" + address
	}
	u, err := url.Parse(address)                                                                                   // its error may contain a part of a password
	if err != nil || u.Host == "" || strings.HasSuffix(u.Host, ":") || u.Scheme != "http" && u.Scheme != "https" { // ftp://x is https://ftp://x
		return fmt.Errorf("%q is no address of a registry, such as https://mirror.example:5000", server)
	}
	return nil
}

// checkTexts wants a text, or a list of texts or, if allowed, of pairs of texts.
func checkTexts(value any, pairs bool) error {
	if _, isText := value.(string); value == nil || isText {
		return nil
	}
	all, isList := value.([]any)
	if !isList {
		return fmt.Errorf("%v is neither a text nor a list of texts", value)
	}
	for _, one := range all {
		pair, isPair := one.([]any)
		if _, isText := one.(string); !isText && (!pairs || !isPair || len(pair) != 2 || checkTexts(one, false) != nil) {
			return fmt.Errorf("%v is not of the right form", one)
		}
	}
	return nil
}

// linesOf returns the lines of a file's keys, each part ending in NUL, and the hosts that have a table.
func linesOf(data []byte) (lines map[string]int, tables map[string]bool) {
	lines, tables = map[string]int{}, map[string]bool{}
	var parser unstable.Parser
	parser.Reset(data)
	table := ""
	for parser.NextExpression() {
		expression := parser.Expression()
		path, line := table, 0
		if expression.Kind == unstable.Table {
			path = ""
		}
		for key := expression.Key(); key.Next(); {
			path += string(key.Node().Data) + "\x00"
			line = parser.Shape(key.Node().Raw).Start.Line
		}
		if expression.Kind == unstable.Table {
			table = path
			if parts := strings.Split(path, "\x00"); len(parts) > 2 && parts[0] == "host" {
				tables[parts[1]] = true
			}
		}
		lines[path] = line
	}
	return lines, tables
}

// CheckRegistries returns what is wrong with the files that say how registries are
// reached: pulls that need them fail, or have no credentials.
func CheckRegistries(certsDirs []string, dockerConfig, verifierDir string) (problems []error) {
	_, err := verifiers(verifierDir)
	problems = append(problems, err, checkDockerConfig(dockerConfig))
	for _, dir := range certsDirs {
		hosts, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			problems = append(problems, fmt.Errorf("registry configuration: %w", err))
		}
		for _, host := range hosts {
			path := filepath.Join(dir, host.Name())
			if info, err := os.Stat(path); err == nil && !info.IsDir() && slices.Contains([]string{".md", ".txt", ""}, filepath.Ext(path)) && host.Name() != "_default" {
				continue // a file beside them, which has no registry's name
			}
			problems = append(problems, checkHostDir(path))
		}
	}
	return slices.DeleteFunc(problems, func(err error) bool { return err == nil })
}

// access makes what one pull may show to whom. It reads the files anew, so that a change counts at the next pull.
func (s *Store) access(ref reference.Named, auth Auth, secrets *redact.Secrets) (*credentials, error) {
	auth.hide(secrets)
	for _, name := range []string{"HTTP_PROXY", "HTTPS_PROXY", "http_proxy", "https_proxy"} {
		if proxy, err := url.Parse(os.Getenv(name)); err == nil && proxy.User != nil {
			password, _ := proxy.User.Password()
			secrets.AddLogin(proxy.User.Username(), password)
		}
	}
	c := &credentials{registry: reference.Domain(ref), repository: reference.Path(ref), request: auth, secrets: secrets}
	var err error
	if c.config, err = readDockerConfig(s.settings().DockerConfig); err != nil {
		return c, err
	}
	_, _, err = auth.login()
	return c, err
}

// resolver makes what one pull uses to reach the registry and its mirrors.
func (s *Store) resolver(ctx context.Context, shown *credentials) remotes.Resolver {
	settings := s.settings()
	hosts := config.ConfigureHosts(ctx, config.HostOptions{
		HostDir:     s.hostDir,
		Credentials: func(host string) (string, string, error) { return shown.login(ctx, host) },
		UpdateClient: func(client *http.Client) error {
			if _, wrapped := client.Transport.(link); !wrapped {
				client.Transport = link{settings.ProgressTimeout, settings.MinRate, shown, client.Transport}
			}
			return nil
		},
	})
	return docker.NewResolver(docker.ResolverOptions{
		Hosts:   authorized(ctx, hosts, shown),
		Headers: http.Header{"User-Agent": []string{"minicri"}},
	})
}

// authorized notes which hosts are the pull's own and keeps credentials with them.
func authorized(ctx context.Context, hosts docker.RegistryHosts, shown *credentials) docker.RegistryHosts {
	return func(name string) ([]docker.RegistryHost, error) {
		all, err := hosts(name)
		for i := range all {
			host := &all[i]
			shown.own.Store(strings.ToLower(host.Host), true)
			shown.last.Store(host.Host)
			for _, values := range host.Header {
				for _, value := range values {
					_, token, _ := strings.Cut(value, " ") // behind a scheme
					shown.secrets.Add(value, token)
				}
			}
			token, err := shown.token(ctx, host.Host)
			if err != nil {
				return nil, err
			}
			elsewhere := docker.NewDockerAuthorizer(docker.WithAuthClient(host.Client))
			host.Authorizer = authorizer{host: host.Host, token: token, shown: host.Authorizer, elsewhere: elsewhere, secrets: shown.secrets}
		}
		return all, err
	}
}

// hostDir finds the first certs directory that knows host.
func (s *Store) hostDir(host string) (string, error) {
	for _, root := range s.settings().CertsDirs {
		dir, err := config.HostDirFromRoot(root)(host)
		if errdefs.IsNotFound(err) {
			continue
		}
		if err == nil {
			err = checkHostDir(dir)
		}
		return dir, err
	}
	return "", fmt.Errorf("registry configuration of %s: %w", host, errdefs.ErrNotFound)
}

// hostsFile is the hosts.toml of a host, or the one that a person would write.
func (s *Store) hostsFile(host string) string {
	for _, root := range s.settings().CertsDirs {
		if dir, err := config.HostDirFromRoot(root)(host); err == nil {
			return filepath.Join(dir, hostsFileName)
		}
	}
	return filepath.Join(append(s.settings().CertsDirs, "/etc/minicri/certs.d")[0], host, hostsFileName)
}
