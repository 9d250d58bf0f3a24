package image

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"slices"
	"strings"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/state"
)

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
