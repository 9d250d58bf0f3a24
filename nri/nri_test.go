package nri

import (
	"context"
	"errors"
	"log/slog"
	"path/filepath"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/test/harness"
)

// none is a node without pods and containers.
type (
	none     struct{}
	nonePods struct{}
)

func (nonePods) List() []*sandbox.Sandbox                   { return nil }
func (nonePods) NetnsPath(*sandbox.Sandbox) string          { return "" }
func (nonePods) UsernsPath(*sandbox.Sandbox) string         { return "" }
func (none) List() []*container.Container                   { return nil }
func (none) Spec(*container.Container) (*specs.Spec, error) { return &specs.Spec{}, nil }
func (none) UpdateUnsolicited(context.Context, string, *runtimeapi.LinuxContainerResources) error {
	return nil
}

// unmeasured are metrics that nobody looks at.
type unmeasured struct{}

func (unmeasured) NRIRequest(string, string, string)        {}
func (unmeasured) NRILatency(string, string, time.Duration) {}
func (unmeasured) NRIPlugins(int)                           {}

// idle is a plugin that does nothing about pods and containers.
type idle struct{}

func (idle) RunPodSandbox(context.Context, *api.PodSandbox) error { return nil }

func (idle) CreateContainer(context.Context, *api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	return nil, nil, nil
}

// newPlugins are those of a directory, which are not started yet.
func newPlugins(t *testing.T, dir string, registration, request time.Duration) *Plugins {
	t.Helper()
	p := New(Options{
		Source:       Source{Enabled: true, Socket: filepath.Join(dir, "s"), PluginDir: dir, ConfigDir: dir},
		Registration: registration, Request: request,
		State: t.TempDir(), Version: "test", Metrics: unmeasured{}, Logger: slog.New(slog.DiscardHandler),
	})
	t.Cleanup(p.Close)
	return p
}

func open(t *testing.T, limit time.Duration) (p *Plugins, socket string) {
	t.Helper()
	dir := t.TempDir()
	p = newPlugins(t, dir, time.Minute, limit)
	harness.Check(t, p.Open(nonePods{}, none{}))
	return p, filepath.Join(dir, "s")
}

func (p *Plugins) run(ctx context.Context, name string) error {
	return p.notify(ctx, func(a *adaptation.Adaptation) error {
		return a.RunPodSandbox(ctx, &adaptation.RunPodSandboxRequest{Pod: &api.PodSandbox{Name: name}})
	})
}

// refuser fails requests about the pods with the name that it has.
type refuser struct{ pod string }

func (r refuser) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	if pod.GetName() == r.pod {
		return errors.New("not wanted")
	}
	return nil
}

// Each error has the name of the plugin whose it is, also when others say the same
// at the same time.
func TestErrorsAreNamed(t *testing.T) {
	p, socket := open(t, time.Minute)
	connectExternal(t, p, socket, "10", refuser{"first"})
	connectExternal(t, p, socket, "20", refuser{"second"})
	var wait sync.WaitGroup
	for range 200 {
		for pod, want := range map[string]string{"first": "NRI plugin 10-slow: ", "second": "NRI plugin 20-slow: "} {
			wait.Go(func() {
				if err := p.run(t.Context(), pod); err == nil || !strings.HasPrefix(err.Error(), want) {
					t.Errorf("want an error of %q, got %v", want, err)
				}
			})
		}
	}
	wait.Wait()
}

// The name is what the user wrote, the digest that of the reference.
func TestImage(t *testing.T) {
	const id, digest = "sha256:1", "sha256:2"
	for _, test := range []struct {
		image             *runtimeapi.ImageSpec
		reference, target string
		want              *api.Image
	}{
		{&runtimeapi.ImageSpec{Image: id, UserSpecifiedImage: "r.test/bb:1"}, "r.test/bb@" + digest, "sha256:3", &api.Image{Name: "r.test/bb:1", Digest: digest, ConfigDigest: id}},
		{&runtimeapi.ImageSpec{Image: "r.test/bb:1"}, id, digest, &api.Image{Name: "r.test/bb:1", Digest: digest, ConfigDigest: id}}, // imported
	} {
		if got := imageOf(test.image, test.reference, test.target, id); got.String() != test.want.String() {
			t.Errorf("got %v, want %v", got, test.want)
		}
	}
}
