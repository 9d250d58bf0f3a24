package image

import (
	"bytes"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"net/http"
	"net/url"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/errdefs"
	"github.com/pelletier/go-toml/v2"
	"github.com/pelletier/go-toml/v2/unstable"

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

// checkHostsFile refuses a file that is not understood whole, by line and key. The
// library would ignore it and go past the mirrors to the registry itself, which is
// what the file may be there to prevent.
func checkHostsFile(path string) error {
	data, err := state.ReadFile(path)
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	if err == nil {
		err = checkHosts(data)
	}
	if err != nil {
		return fmt.Errorf("registry configuration %s: %w: %w", path, err, errdefs.ErrFailedPrecondition)
	}
	return nil
}

func checkHosts(data []byte) error {
	var file hostsFile
	if err := toml.NewDecoder(bytes.NewReader(data)).DisallowUnknownFields().Decode(&file); err != nil {
		return positioned(err)
	}
	lines := linesOf(data)
	check := func(table []string, key string, err error) error {
		if err == nil {
			return nil
		}
		path := append(slices.Clone(table), key)
		return fmt.Errorf("line %d: %s: %w", lines.of(path), strings.Join(path, "."), err)
	}
	err := errors.Join(check(nil, "server", checkServer(file.Server)), file.check(nil, check))
	for name, fields := range file.Hosts {
		table := []string{"host", name}
		if !lines.tables[name] { // the library sees headers of tables alone
			err = errors.Join(err, check(table[:1], name, errors.New("it has to be a table of its own, under [host.\""+name+"\"]")))
		}
		if name == "" {
			err = errors.Join(err, check(table[:1], name, errors.New("it has no address")))
		}
		err = errors.Join(err, check(table[:1], name, checkServer(name)), fields.check(table, check))
	}
	return err
}

// positioned puts line and key before what the decoder says.
func positioned(err error) error {
	var all []error
	if unknown, ok := errors.AsType[*toml.StrictMissingError](err); ok {
		for i := range unknown.Errors {
			line, _ := unknown.Errors[i].Position()
			all = append(all, fmt.Errorf("line %d: %s: there is no such key", line, strings.Join(unknown.Errors[i].Key(), ".")))
		}
		return errors.Join(all...)
	}
	if wrong, ok := errors.AsType[*toml.DecodeError](err); ok {
		line, _ := wrong.Position()
		return fmt.Errorf("line %d: %s: %w", line, strings.Join(wrong.Key(), "."), err)
	}
	return err
}

func (f hostFields) check(table []string, check func(table []string, key string, err error) error) error {
	err := errors.Join(
		check(table, "capabilities", checkCapabilities(f.Capabilities)),
		check(table, "ca", checkTexts(f.CA, 1)),
		check(table, "client", checkTexts(f.Client, 2)),
		check(table, "dial_timeout", checkTimeout(f.DialTimeout)),
	)
	for name, value := range f.Header {
		err = errors.Join(err, check(append(slices.Clone(table), "header"), name, checkTexts(value, 1)))
	}
	return err
}

func checkServer(server string) error {
	if server == "" {
		return nil
	}
	address := server
	if !strings.HasPrefix(address, "http") { // as the library has it
		address = "https://" + address
	}
	u, err := url.Parse(address)
	if err != nil {
		return err
	}
	if u.Host == "" || u.Scheme != "http" && u.Scheme != "https" {
		return fmt.Errorf("%q is no address of a registry, such as https://mirror.example:5000", server)
	}
	return nil
}

func checkCapabilities(all []string) error {
	for _, one := range all {
		if !slices.Contains([]string{"pull", "resolve", "push", "referrers"}, strings.ToLower(one)) {
			return fmt.Errorf("%q is none of pull, resolve, push and referrers", one)
		}
	}
	return nil
}

// checkTexts wants a text or a list of texts; of depth 2, also of pairs of texts.
func checkTexts(value any, depth int) error {
	all, isList := value.([]any)
	if _, isText := value.(string); value == nil || isText {
		return nil
	}
	for _, one := range all {
		pair, isPair := one.([]any)
		if _, isText := one.(string); isText {
			continue
		}
		if depth < 2 || !isPair || len(pair) != 2 || checkTexts(pair, 1) != nil {
			return fmt.Errorf("%v is not of the right form", one)
		}
	}
	if !isList {
		return fmt.Errorf("%v is neither a text nor a list of texts", value)
	}
	return nil
}

func checkTimeout(text string) error {
	if text == "" {
		return nil
	}
	timeout, err := time.ParseDuration(text)
	if err == nil && timeout <= 0 {
		err = fmt.Errorf("%s is no time", text)
	}
	return err
}

// hostsLines knows where the keys of a file are, and which hosts have a table.
type hostsLines struct {
	lines  map[string]int
	tables map[string]bool
}

// of returns the line of a key, or of the nearest table above it.
func (l hostsLines) of(path []string) int {
	for ; len(path) > 0; path = path[:len(path)-1] {
		if line, ok := l.lines[strings.Join(path, "\x00")]; ok {
			return line
		}
	}
	return 1
}

func linesOf(data []byte) hostsLines {
	found := hostsLines{lines: map[string]int{}, tables: map[string]bool{}}
	var parser unstable.Parser
	parser.Reset(data)
	var table []string
	for parser.NextExpression() {
		expression := parser.Expression()
		path, line := []string{}, 0
		for key := expression.Key(); key.Next(); {
			path = append(path, string(key.Node().Data))
			line = parser.Shape(key.Node().Raw).Start.Line
		}
		if expression.Kind == unstable.Table {
			table = path
			if len(path) > 1 && path[0] == "host" {
				found.tables[path[1]] = true
			}
		} else {
			path = append(slices.Clone(table), path...)
		}
		found.lines[strings.Join(path, "\x00")] = line
	}
	return found
}

// CheckRegistries returns what is wrong with the files that say how registries are
// reached: pulls that need them fail, or have no credentials.
func CheckRegistries(certsDirs []string, dockerConfig string) (problems []error) {
	for _, dir := range certsDirs {
		hosts, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, fs.ErrNotExist) {
			problems = append(problems, fmt.Errorf("registry configuration: %w", err))
		}
		for _, host := range hosts {
			if err := checkHostsFile(filepath.Join(dir, host.Name(), hostsFileName)); err != nil {
				problems = append(problems, err)
			}
		}
	}
	if err := checkDockerConfig(dockerConfig); err != nil {
		problems = append(problems, err)
	}
	return problems
}

// resolver makes what one pull uses to reach the registry and its mirrors. The
// files that say how are read now, so that a change counts at the next pull.
func (s *Store) resolver(ctx context.Context, ref Reference, auth Auth) (remotes.Resolver, func(), error) {
	stored, err := readDockerConfig(s.settings().DockerConfig)
	if err != nil {
		return nil, nil, err
	}
	own := &ownHosts{}
	shown := credentials{registry: ref.Host(), request: auth, config: stored, own: own}
	if _, err := auth.login(); err != nil {
		return nil, nil, err
	}
	link := &link{timeout: s.settings().ProgressTimeout, minRate: s.settings().MinRate, own: own.has}
	hosts := config.ConfigureHosts(ctx, config.HostOptions{
		HostDir:      s.hostDir,
		Credentials:  func(host string) (string, string, error) { return shown.login(ctx, host) },
		UpdateClient: link.wrap,
	})
	return docker.NewResolver(docker.ResolverOptions{
		Hosts:   authorized(ctx, hosts, shown),
		Headers: http.Header{"User-Agent": []string{"minicri"}},
	}), link.close, nil
}

// authorized notes which hosts are the pull's own and keeps credentials with
// them. A ready token takes the place of the token protocol.
func authorized(ctx context.Context, hosts docker.RegistryHosts, shown credentials) docker.RegistryHosts {
	return func(name string) ([]docker.RegistryHost, error) {
		all, err := hosts(name)
		for i := range all {
			host := &all[i]
			shown.own.add(host.Host)
			a := authorizer{host: host.Host, shown: host.Authorizer, elsewhere: docker.NewDockerAuthorizer(docker.WithAuthClient(host.Client))}
			token, err := shown.token(ctx, host.Host)
			if err != nil {
				return nil, err
			}
			if token != "" {
				a.shown = tokenAuthorizer{token}
			}
			host.Authorizer = a
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
			err = checkHostsFile(filepath.Join(dir, hostsFileName))
		}
		return dir, err
	}
	return "", fmt.Errorf("registry configuration of %s: %w", host, errdefs.ErrNotFound)
}
