package nri

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
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

// counted counts requests by plugin and outcome.
type counted struct {
	mu       sync.Mutex
	requests map[string]int
}

func (c *counted) NRIRequest(plugin, request, outcome string) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.requests[plugin+" "+request+" "+outcome]++
}
func (*counted) NRILatency(string, string, time.Duration) {}
func (*counted) NRIPlugins(int)                           {}

// slow is a plugin whose answers about the pod "hung" never come.
type slow struct{ asked chan string }

func (s slow) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	s.asked <- pod.GetName()
	if pod.GetName() == "hung" {
		select {}
	}
	return nil
}

func (s slow) CreateContainer(context.Context, *api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	return nil, nil, nil
}

func open(t *testing.T, limit time.Duration) (*Plugins, *counted, string) {
	t.Helper()
	dir := t.TempDir()
	measured := &counted{requests: make(map[string]int)}
	p := New(Options{
		Source:       Source{Enabled: true, Socket: filepath.Join(dir, "s"), PluginDir: dir, ConfigDir: dir},
		Registration: time.Minute, Request: limit,
		State: t.TempDir(), Version: "test", Metrics: measured, Logger: slog.New(slog.DiscardHandler),
	})
	must(t, p.Open(nonePods{}, none{}))
	t.Cleanup(p.Close)
	return p, measured, filepath.Join(dir, "s")
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
	p, _, socket := open(t, time.Minute)
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

// While one plugin hangs others wait, as long as their context lets them; then it is
// counted and dropped, and they go on.
func TestAPluginThatHangsIsDropped(t *testing.T) {
	p, measured, socket := open(t, 3*time.Second)
	asked := make(chan string, 1000)
	connectExternal(t, p, socket, "10", slow{asked})
	hung := make(chan error, 1)
	go func() { hung <- p.run(t.Context(), "hung") }()
	if name := <-asked; name != "hung" {
		t.Fatalf("asked about %s", name)
	}
	impatient, cancel := context.WithCancel(t.Context())
	cancel()
	if err := p.run(impatient, "impatient"); !errors.Is(err, context.Canceled) {
		t.Errorf("who does not wait gets %v", err)
	}
	var wait sync.WaitGroup
	for i := range 50 {
		wait.Go(func() {
			if err := p.run(t.Context(), fmt.Sprint(i)); err != nil {
				t.Error(err)
			}
		})
	}
	if got := p.Connected(); !slices.Equal(got, []string{"10-slow"}) {
		t.Errorf("connected while it hangs: %v", got)
	}
	if err := <-hung; err != nil {
		t.Errorf("a pod has to do without the plugin: %v", err)
	}
	wait.Wait()
	awaitThat(t, "the plugin is not connected any more", func() bool { return len(p.Connected()) == 0 })
	connectExternal(t, p, socket, "20", slow{asked})
	if err := p.run(t.Context(), "after"); err != nil || <-asked != "after" {
		t.Errorf("the next plugin was not asked: %v", err)
	}
	measured.mu.Lock()
	defer measured.mu.Unlock()
	if measured.requests["10-slow RunPodSandbox ok"] != 0 || measured.requests["10-slow RunPodSandbox timeout"] != 1 {
		t.Errorf("counted: %v", measured.requests)
	}
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

// must ends the test for an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
