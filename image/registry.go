package image

import (
	"context"
	"fmt"
	"net/http"
	"path/filepath"

	"github.com/containerd/containerd/v2/core/remotes"
	"github.com/containerd/containerd/v2/core/remotes/docker"
	"github.com/containerd/containerd/v2/core/remotes/docker/config"
	"github.com/containerd/errdefs"
)

// resolver makes what one pull uses to reach the registry and its mirrors. The
// files that say how are read now, so that a change counts at the next pull.
func (s *Store) resolver(ctx context.Context, ref Reference, auth Auth) (remotes.Resolver, func(), error) {
	stored, err := readDockerConfig(s.settings().DockerConfig)
	if err != nil {
		return nil, nil, err
	}
	own := newOwnHosts()
	shown := credentials{registry: ref.Host(), request: auth, config: stored, own: own}
	if _, err := auth.login(); err != nil {
		return nil, nil, err
	}
	link := &link{timeout: s.settings().ProgressTimeout, minRate: s.settings().MinRate, own: own.has}
	hosts := config.ConfigureHosts(ctx, config.HostOptions{
		HostDir:      s.hostDir,
		Credentials:  shown.login,
		UpdateClient: link.wrap,
	})
	return docker.NewResolver(docker.ResolverOptions{
		Hosts:   authorized(hosts, shown),
		Headers: http.Header{"User-Agent": []string{"minicri"}},
	}), link.close, nil
}

// authorized notes which hosts are the pull's own and keeps credentials with
// them. A ready token takes the place of the token protocol.
func authorized(hosts docker.RegistryHosts, shown credentials) docker.RegistryHosts {
	return func(name string) ([]docker.RegistryHost, error) {
		all, err := hosts(name)
		for i := range all {
			host := &all[i]
			shown.own.add(host.Host)
			a := authorizer{host: host.Host, shown: host.Authorizer, elsewhere: docker.NewDockerAuthorizer(docker.WithAuthClient(host.Client))}
			if token := shown.forHost(host.Host).RegistryToken; token != "" {
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
