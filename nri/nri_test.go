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
	"google.golang.org/protobuf/encoding/protojson"
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
	p := New(Options{
		Source:       Source{Enabled: true, Socket: filepath.Join(dir, "s"), PluginDir: dir, ConfigDir: dir},
		Registration: registration, Request: request,
		State: t.TempDir(), Version: "test", Metrics: unmeasured{}, Logger: slog.New(slog.DiscardHandler),
	})
	t.Cleanup(p.Close)
	return p
}

func open(t *testing.T, limit time.Duration) (p *Plugins, socket string) {
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

// Each error has the name of the plugin whose it is, also when others say the same at the same time.
func TestErrorsAreNamed(t *testing.T) {
	p, socket := open(t, time.Minute)
	connectExternal(t, p, socket, "10", refuser{"first"})
	connectExternal(t, p, socket, "20", refuser{"second"})
	var wait sync.WaitGroup
	for range 200 {
		for pod, want := range map[string]string{"first": "NRI plugin 10-slow: ", "second": "NRI plugin 20-slow: "} {
			wait.Go(func() {
				err := p.run(t.Context(), pod)
				harness.Want(t, err != nil && strings.HasPrefix(err.Error(), want), "want an error of %q, got %v", want, err)
			})
		}
	}
	wait.Wait()
}

// A plugin's adjustments are in the spec, those that the library's generator leaves out, too.
func TestAdjustedSpec(t *testing.T) {
	wanted := &api.ContainerAdjustment{}
	err := protojson.Unmarshal([]byte(`{
		"annotations": {"a": "new", "-b": ""}, "env": [{"key": "A", "value": "new"}, {"key": "-B"}, {"key": "C", "value": "1"}],
		"mounts": [{"destination": "-/gone"}, {"destination": "/new", "type": "tmpfs"}],
		"linux": {
			"sysctl": {"kernel.a": "1", "-kernel.b": ""}, "namespaces": [{"type": "-ipc"}, {"type": "network", "path": "/n"}],
			"netDevices": {"eth7": {"name": "eth0"}}, "ioPriority": {"class": "IOPRIO_CLASS_BE", "priority": 3},
			"scheduler": {"policy": "SCHED_BATCH"}, "rdt": {"closId": {"value": "gold"}},
			"resources": {"memory": {"limit": {"value": "10"}, "swap": {"value": "30"}, "reservation": {"value": "5"}, "swappiness": {"value": "7"}},
				"hugepageLimits": [{"pageSize": "2MB", "limit": "4"}], "unified": {"memory.high": "9"}}}}`), wanted)
	harness.Check(t, err)
	spec := &specs.Spec{
		Annotations: map[string]string{"a": "old", "b": "old"}, Process: &specs.Process{Env: []string{"A=old", "B=old"}},
		Mounts: []specs.Mount{{Destination: "/gone"}, {Destination: "/kept"}},
		Linux: &specs.Linux{
			Sysctl: map[string]string{"kernel.b": "1"}, Namespaces: []specs.LinuxNamespace{{Type: "ipc"}, {Type: "network"}, {Type: "mount"}},
		},
	}
	harness.Check(t, adjust(spec, wanted, nil))
	limit, swap, reservation, swappiness := int64(10), int64(30), int64(5), uint64(7)
	want := &specs.Spec{
		Annotations: map[string]string{"a": "new"}, Process: &specs.Process{
			Env: []string{"A=new", "C=1"}, IOPriority: &specs.LinuxIOPriority{Class: "IOPRIO_CLASS_BE", Priority: 3}, Scheduler: spec.Process.Scheduler,
		},
		Mounts: []specs.Mount{{Destination: "/kept"}, {Destination: "/new", Type: "tmpfs", Options: spec.Mounts[1].Options}},
		Linux: &specs.Linux{
			Sysctl: map[string]string{"kernel.a": "1"}, Namespaces: []specs.LinuxNamespace{{Type: "network", Path: "/n"}, {Type: "mount"}},
			NetDevices: map[string]specs.LinuxNetDevice{"eth7": {Name: "eth0"}}, IntelRdt: &specs.LinuxIntelRdt{ClosID: "gold"},
			Resources: &specs.LinuxResources{
				Memory:         &specs.LinuxMemory{Limit: &limit, Swap: &swap, Reservation: &reservation, Swappiness: &swappiness},
				HugepageLimits: []specs.LinuxHugepageLimit{{Pagesize: "2MB", Limit: 4}}, Unified: map[string]string{"memory.high": "9"},
			},
		},
	}
	harness.Want(t, spec.Process.Scheduler != nil && spec.Process.Scheduler.Policy == specs.SchedBatch,
		"scheduler %+v", spec.Process.Scheduler)
	harness.Same(t, "the spec", spec, want)
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
		got := imageOf(test.image, test.reference, test.target, id)
		harness.Want(t, got.String() == test.want.String(), "got %v, want %v", got, test.want)
	}
}
