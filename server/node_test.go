package server

import (
	"context"
	"encoding/json"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	"google.golang.org/protobuf/encoding/protojson"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/stats"
	"github.com/minicri/minicri/supervisor/client"
)

// stored is a pod that an earlier daemon left.
type stored struct {
	id     string
	config *runtimeapi.PodSandboxConfig
	ready  bool
}

// restored is a runtime that has found these pods on its disk. The pause
// process of those that are ready is a process of the test.
func restored(t *testing.T, pods ...stored) *Runtime {
	t.Helper()
	options := sandbox.Options{
		Root: t.TempDir(), State: t.TempDir(),
		Limits:   sandbox.Limits{Run: time.Minute, Destroy: time.Minute, Create: time.Minute, Kill: time.Minute},
		Handlers: handler.New(map[string]handler.Spec{"runc": {}}, handler.Features{}),
		Logger:   slog.New(slog.DiscardHandler),
	}
	identity, err := node.Open(options.Root, options.State, t.TempDir())
	must(t, err)
	options.Node = identity
	store(t, options, pods)
	options.Netns, options.Userns = namespaces(t, identity.Mark()), namespaces(t, identity.Mark())
	options.Networks = networks(t, options)
	if options.Hierarchies, err = cgroup.FindHierarchies(); err != nil {
		t.Fatal(err)
	}
	runtime := &Runtime{Networks: options.Networks, Events: NewBroadcaster(), Info: Info{Version: "1.2.3", Handlers: options.Handlers, Config: func() any { return nil }}}
	options.Events = runtime
	if options.Supervisors, err = client.NewSet(client.SetOptions{Dir: filepath.Join(options.State, "shims"), Logger: options.Logger}); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(options.Supervisors.Close)
	options.Group = "node"
	if runtime.Sandboxes, err = sandbox.Open(t.Context(), options); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(runtime.Sandboxes.Close)
	runtime.Containers = containers(t, options, runtime)
	if runtime.Stats, err = stats.Open(t.Context(), noLayers{}, options.Logger); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(runtime.Stats.Close)
	return runtime
}

// containers are those of pods that have none, in a directory of their own.
func containers(t *testing.T, options sandbox.Options, runtime *Runtime) *container.Store {
	t.Helper()
	opened, err := container.Open(t.Context(), container.Options{
		Options: options, Images: noImages{},
		Places: &sweep.Places{
			Node: options.Node, Hierarchies: options.Hierarchies, Netns: options.Netns, Userns: options.Userns, Root: options.Root, State: options.State, Kill: time.Minute,
		},
		Sandboxes: runtime.Sandboxes, Events: runtime,
	})
	must(t, err)
	t.Cleanup(opened.Close)
	runtime.Sandboxes.SetContainers(opened)
	return opened
}

// noImages has no layer of a container.
type noImages struct{ container.Images }

func (noImages) Snapshots(context.Context) ([]string, error) { return nil, nil }

// noLayers are those of no container.
type noLayers struct{}

func (noLayers) SnapshotUsage(context.Context, string) (image.Usage, error) {
	return image.Usage{}, errdefs.ErrNotFound
}

func store(t *testing.T, options sandbox.Options, pods []stored) {
	t.Helper()
	bootID, err := process.BootID()
	must(t, err)
	must(t, os.WriteFile(filepath.Join(options.State, "boot-id"), []byte(bootID), 0o600))
	records, err := state.Open[sandbox.Record](filepath.Join(options.Root, "sandboxes"), 1, false)
	must(t, err)
	facts, err := state.Open[sandbox.Facts](filepath.Join(options.State, "facts"), 1, false)
	must(t, err)
	for i, pod := range pods {
		config, err := protojson.Marshal(pod.config)
		must(t, err)
		record := sandbox.Record{ID: pod.id, CreatedAt: int64(i + 1), CgroupsPath: "/" + options.Node.Mark() + pod.id, Config: json.RawMessage(config)}
		fact := sandbox.Facts{BootID: bootID, ReadyAt: time.Now(), StoppedAt: time.Now()}
		if pod.ready {
			fact.StoppedAt, fact.Pause = time.Time{}, startProcess(t)
		}
		must(t, records.Write(pod.id, record))
		must(t, facts.Write(pod.id, fact))
	}
}

func startProcess(t *testing.T) process.Facts {
	t.Helper()
	command := exec.Command("sleep", "600")
	must(t, command.Start())
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait()
	})
	stat, err := process.ReadStat(command.Process.Pid)
	must(t, err)
	return process.Facts{PID: command.Process.Pid, StartTime: stat.StartTime}
}

func namespaces(t *testing.T, mark string) *namespace.Dir {
	t.Helper()
	directory := filepath.Join(t.TempDir(), "namespaces")
	opened, err := namespace.Open(directory, mark)
	if err != nil {
		t.Fatalf("needs root: %v", err)
	}
	t.Cleanup(func() {
		if err := unix.Unmount(directory, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	return opened
}

func networks(t *testing.T, options sandbox.Options) *network.CNI {
	t.Helper()
	opened, err := network.Open(t.Context(), network.Options{
		ConfDir: t.TempDir(), Root: options.Root, Namespaces: options.Netns,
		CgroupParent: fmt.Sprintf("/minicri-unit-server-%d", os.Getpid()), Mark: "minicri-cni-",
		Limits: network.Limits{Status: time.Minute, StatusPeriod: time.Second, Reload: time.Second},
		Logger: options.Logger,
	})
	must(t, err)
	go opened.Run(t.Context())
	t.Cleanup(opened.Close)
	return opened
}

// dial serves the runtime on a unix socket and connects to it.
func dial(t *testing.T, runtime *Runtime) runtimeapi.RuntimeServiceClient {
	t.Helper()
	return runtimeapi.NewRuntimeServiceClient(serveOnSocket(t, New(runtime, nil, nil, slog.New(slog.DiscardHandler))))
}

func serveOnSocket(t testing.TB, server *grpc.Server) *grpc.ClientConn {
	t.Helper()
	socket := filepath.Join(t.TempDir(), "s")
	listener, err := net.Listen("unix", socket)
	must(t, err)
	served := make(chan error, 1)
	go func() { served <- server.Serve(listener) }()
	connection, err := grpc.NewClient("unix://"+socket, grpc.WithTransportCredentials(insecure.NewCredentials()))
	must(t, err)
	t.Cleanup(func() {
		_ = connection.Close()
		server.Stop()
		if err := <-served; err != nil {
			t.Error(err)
		}
	})
	return connection
}

func podConfig(name string, labels map[string]string) *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "default", Uid: name},
		Labels:   labels,
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
			NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE},
		}},
	}
}

// must ends the test for an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
