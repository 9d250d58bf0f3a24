package main

import (
	"context"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
)

const e2eRepository = "registry.k8s.io/e2e-test-images/"

// e2ePrograms are what Kubernetes' own tests need besides a cluster. Those of a
// node want a bare one, the others do not; each suite takes minutes to build.
func (c *cluster) e2ePrograms() module {
	m := module{"kubernetes", map[string]string{"ginkgo": "github.com/onsi/ginkgo/v2/ginkgo"}}
	if c.Bare {
		m.packages["e2e_node.test"] = "k8s.io/kubernetes/test/e2e_node"
	} else {
		m.packages["e2e.test"] = "k8s.io/kubernetes/test/e2e"
		m.packages["sample-apiserver"] = "k8s.io/sample-apiserver"
	}
	return m
}

// e2eImages stand in for the images that the specs name: Debian's busybox, agnhost
// itself, and test/critest/replica for what is no part of Kubernetes. The sources
// are those of Kubernetes' own images.
func e2eImages(pauseTag, sources string) []imageOf {
	shell, debian := []string{"sh"}, []string{busybox, "/usr/bin/bash", "/usr/bin/curl", "/usr/sbin/ip", "/usr/bin/dig", "/usr/bin/getent"}
	// Debian's busybox drops variables with a dash in their names from what it
	// starts, bash does not.
	bash := map[string]string{"/bin/sh": "bash"}
	var list []imageOf
	for _, tag := range []string{"2.55", "2.66.1"} {
		list = append(list, imageOf{
			name: e2eRepository + "agnhost", tag: tag, programs: []string{"agnhost", "replica"}, installed: debian,
			links: map[string]string{"/agnhost": "usr/local/bin/agnhost", "/agnhost-2": "usr/local/bin/agnhost", "/bin/pgrep": "../local/bin/replica", "/bin/nmeter": "../local/bin/replica", "/bin/nc": "../local/bin/replica", "/bin/sh": "bash"},
			files: map[string]string{
				"/localhost.crt": filepath.Join(sources, "agnhost/porter/localhost.crt"),
				"/localhost.key": filepath.Join(sources, "agnhost/porter/localhost.key"),
			},
			entrypoint: []string{"/agnhost"}, command: []string{"pause"},
		})
	}
	for _, tag := range []string{"1.36.1-1", "1.37.0-2"} {
		list = append(list, imageOf{
			name: e2eRepository + "busybox", tag: tag, programs: []string{"replica"}, installed: debian[:2],
			links: map[string]string{"/bin/sh": "bash", "/bin/nmeter": "../local/bin/replica"}, command: shell,
		})
	}
	for _, tag := range []string{"1.27.0-2", "1.28.0-2"} {
		list = append(list, imageOf{
			name: e2eRepository + "nginx", tag: tag, programs: []string{"replica"}, installed: debian[:1],
			links: map[string]string{"/bin/nginx": "../local/bin/replica"}, entrypoint: []string{"nginx"},
		})
	}
	return append(list,
		imageOf{
			name: e2eRepository + "nonewprivs", tag: "1.4", programs: []string{"replica"}, setuid: "replica", installed: debian[:1],
			links: map[string]string{"/bin/nonewprivs": "../local/bin/replica"}, entrypoint: []string{"nonewprivs"},
		},
		imageOf{
			name: e2eRepository + "glibc-dns-testing", tag: "2.1.1", links: bash, command: shell,
			installed: append([]string{"/usr/bin/hostname", "/usr/bin/getent", "/usr/bin/dig"}, debian[:2]...),
		},
		imageOf{name: e2eRepository + "nonroot", tag: "1.5", installed: debian[:1], user: "1234", command: shell},
		imageOf{
			name: e2eRepository + "ipc-utils", tag: "1.4", programs: []string{"replica"}, installed: debian[:1],
			links: map[string]string{"/bin/ipcs": "../local/bin/replica"}, command: shell,
		},
		imageOf{name: "registry.k8s.io/pause", tag: pauseTag, programs: []string{"agnhost"}, entrypoint: []string{"agnhost"}, command: []string{"pause"}},
	)
}

// clusterImages are of specs that want a whole cluster: an API server that extends
// the cluster's, with its etcd, and agnhost with a picture.
func clusterImages(sources string) []imageOf {
	html := filepath.Join(sources, "nautilus/html")
	return []imageOf{
		{name: e2eRepository + "sample-apiserver", tag: "1.29.2", programs: []string{"sample-apiserver"}, entrypoint: []string{"sample-apiserver"}},
		{name: "registry.k8s.io/etcd", tag: "3.7.0-0", programs: []string{"etcd"}, entrypoint: []string{"etcd"}},
		{
			name: e2eRepository + "nautilus", tag: "1.8", programs: []string{"agnhost"},
			files:      map[string]string{"/data.json": filepath.Join(html, "data.json"), "/nautilus.jpg": filepath.Join(html, "nautilus.jpg")},
			entrypoint: []string{"agnhost"}, command: []string{"test-webserver"},
		},
	}
}

// prepareE2E builds Kubernetes' own tests, imports the images of their specs on
// every node.
func (c *cluster) prepareE2E(ctx context.Context) error {
	b, err := c.build(ctx)
	if err != nil {
		return err
	}
	if err := c.buildE2E(ctx, b); err != nil {
		return err
	}
	top, err := tree()
	if err != nil {
		return err
	}
	module, err := output(exec.CommandContext(ctx, "go", "list", "-C", filepath.Join(top, "hack/cluster/kubernetes"), "-m", "-f", "{{.Dir}}", "k8s.io/kubernetes"))
	if err != nil {
		return err
	}
	sources := filepath.Join(strings.TrimSpace(module), "test/images")
	list := e2eImages(b.pause[len(repository+"/pause:"):], sources)
	if !c.Bare {
		list = append(list, clusterImages(sources)...)
	}
	for _, i := range list {
		file, err := i.make(ctx, b.programs, c.progress)
		if err != nil {
			return err
		}
		if err := c.importEverywhere(ctx, file); err != nil {
			return err
		}
	}
	return nil
}

func (c *cluster) buildE2E(ctx context.Context, b *built) error {
	top, err := tree()
	if err != nil {
		return err
	}
	if err := c.e2ePrograms().build(ctx, filepath.Join(top, "hack/cluster"), b.programs, b.version, c.progress); err != nil {
		return err
	}
	replica := exec.CommandContext(ctx, "go", "build", "-C", top, "-trimpath", "-buildvcs=false", "-ldflags", "-s -w", "-o", filepath.Join(b.programs, "replica"), "./test/critest/replica")
	replica.Env = append(os.Environ(), "CGO_ENABLED=0")
	_, err = output(replica)
	return err
}
