package image

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"

	"github.com/containerd/errdefs"
)

// dockerConfig is the part of a docker config.json that holds credentials.
// https://docs.docker.com/reference/cli/docker/login/
type dockerConfig struct {
	Auths map[string]dockerAuth `json:"auths"`
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
	data, err := os.ReadFile(path)
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
