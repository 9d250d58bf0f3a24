package image

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/state"
)

// dockerConfig is the part of a docker config.json that holds credentials.
// https://docs.docker.com/reference/cli/docker/login/
type dockerConfig struct {
	Auths map[string]dockerAuth `json:"auths"`
	// Programs that hold credentials are not asked: see unsupported.
	CredsStore  string            `json:"credsStore"`
	CredHelpers map[string]string `json:"credHelpers"`
}

// unsupported names what the file says of credentials and nothing here reads.
func (c dockerConfig) unsupported() (keys []string) {
	if c.CredsStore != "" {
		keys = append(keys, "credsStore")
	}
	if len(c.CredHelpers) > 0 {
		keys = append(keys, "credHelpers")
	}
	return keys
}

// warnOfDockerConfig says at the start what the docker config.json has that
// pulls will not use.
func (s *Store) warnOfDockerConfig() {
	config, err := readDockerConfig(s.settings().DockerConfig)
	if err != nil {
		s.log.Warn("images.docker_config cannot be used; pulls that need it will fail", "error", err)
		return
	}
	if keys := config.unsupported(); len(keys) > 0 {
		s.log.Warn("images.docker_config has keys that are not supported; only the credentials below \"auths\" are used", "path", s.settings().DockerConfig, "keys", keys)
	}
}

type dockerAuth struct {
	Username      string `json:"username"`
	Password      string `json:"password"`
	Auth          string `json:"auth"`
	IdentityToken string `json:"identitytoken"`
	RegistryToken string `json:"registrytoken"`
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
			return Auth{
				Username: a.Username, Password: a.Password, Auth: a.Auth,
				IdentityToken: a.IdentityToken, RegistryToken: a.RegistryToken,
			}, true
		}
	}
	return Auth{}, false
}
