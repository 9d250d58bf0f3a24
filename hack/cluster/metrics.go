package main

import (
	"context"
	_ "embed"
	"path/filepath"
	"strings"
)

// metricsPrograms are no part of modules: a cluster does without them.
var metricsPrograms = module{"metrics-server", map[string]string{
	"metrics-server": "sigs.k8s.io/metrics-server/cmd/metrics-server",
}}

// metricsTag is the version in metrics-server/go.mod.
const metricsTag = "minicri"

//go:embed metrics.yaml
var metricsManifest string

// addMetrics runs a metrics-server in the cluster and waits until its API is
// there. It asks the kubelets, which ask the runtime.
func (c *cluster) addMetrics(ctx context.Context) error {
	b, err := c.build(ctx)
	if err != nil {
		return err
	}
	top, err := tree()
	if err != nil {
		return err
	}
	if err := metricsPrograms.build(ctx, filepath.Join(top, "hack/cluster"), b.programs, b.version, c.progress); err != nil {
		return err
	}
	image := imageOf{name: "metrics-server", tag: metricsTag, programs: []string{"metrics-server"}, entrypoint: []string{"/usr/local/bin/metrics-server"}}
	file, err := image.make(ctx, b.programs, c.progress)
	if err != nil {
		return err
	}
	if err := c.importEverywhere(ctx, file); err != nil {
		return err
	}
	apply := c.kubectl(ctx, "apply", "-f", "-")
	apply.Stdin = strings.NewReader(metricsManifest)
	if _, err := output(apply); err != nil {
		return err
	}
	if _, err := output(c.kubectl(ctx, "wait", "--for=condition=Available", "apiservice/v1beta1.metrics.k8s.io", "--timeout=4m")); err != nil {
		return err
	}
	c.progress.did("metrics-server serves")
	return nil
}
