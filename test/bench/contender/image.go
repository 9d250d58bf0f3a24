package contender

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"context"
	"fmt"
	"io"
	"os"
	"runtime"

	"github.com/google/go-containerregistry/pkg/name"
	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	"github.com/google/go-containerregistry/pkg/v1/tarball"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/oci/pause"
	"github.com/minicri/minicri/test/hostile/registry"
)

const (
	// Image is what containers of benchmarks are made from: busybox and App.
	Image = "bench.example/app:1"
	// pauseImage is minicri's own pause program, for runtimes that want an image.
	pauseImage = "bench.example/pause:1"
	// App is a program that sleeps, and ends at SIGTERM.
	App = "/app"

	busybox = "/bin/busybox" // Debian's busybox-static
)

// writeImages writes an archive of both images, as docker save does.
func writeImages(path string) {
	program := Must(pause.Binary())
	box, err := os.ReadFile(busybox)
	if err != nil {
		Check(fmt.Errorf("%w: run make setup", err))
	}
	app := []registry.Entry{registry.File(App[1:], 0o755, string(program)), registry.File("bin/busybox", 0o755, string(box))}
	for _, dir := range []string{"bin", "dev", "etc", "proc", "sys", "tmp"} {
		app = append(app, registry.Dir(dir, 0o755, 0))
	}
	for _, applet := range []string{"sh", "true"} {
		app = append(app, registry.Entry{Header: tar.Header{Typeflag: tar.TypeSymlink, Name: "bin/" + applet, Linkname: "busybox"}})
	}
	Check(tarball.MultiWriteToFile(path, map[name.Tag]v1.Image{
		Must(name.NewTag(Image)):      imageOf(v1.Config{Entrypoint: []string{App}, Env: []string{"PATH=/bin"}}, layerOf(app...)),
		Must(name.NewTag(pauseImage)): imageOf(v1.Config{Entrypoint: []string{"/pause"}}, layerOf(registry.File("pause", 0o755, string(program)))),
	}))
}

// imageOf is an image for this machine.
func imageOf(config v1.Config, layers ...v1.Layer) v1.Image {
	img := Must(mutate.AppendLayers(empty.Image, layers...))
	file := Must(img.ConfigFile()).DeepCopy()
	file.OS, file.Architecture, file.Config = "linux", runtime.GOARCH, config
	return Must(mutate.ConfigFile(img, file))
}

// layerOf is a layer of these entries.
func layerOf(entries ...registry.Entry) v1.Layer {
	data := registry.Layer(entries...)
	return Must(tarball.LayerFromOpener(func() (io.ReadCloser, error) { return io.NopCloser(bytes.NewReader(data)), nil },
		tarball.WithCompressionLevel(gzip.DefaultCompression)))
}

// Pod is a pod of a node.
type Pod struct {
	ID   string
	Node *Node
	// Seccomp is the filter of system calls of the containers that are made from now on.
	Seccomp runtimeapi.SecurityProfile_ProfileType
	config  *runtimeapi.PodSandboxConfig
}

// RunPod runs a pod such as the kubelet sends, in a network of its own.
func (n *Node) RunPod(ctx context.Context, name string) *Pod {
	return n.runPod(ctx, name, name, runtimeapi.NamespaceMode_POD)
}

// RunHostPod runs one in the network of the node, which takes no plugin.
func (n *Node) RunHostPod(ctx context.Context, name string) *Pod {
	return n.runPod(ctx, name, "", runtimeapi.NamespaceMode_NODE) // it has the node's hostname
}

func (n *Node) runPod(ctx context.Context, name, hostname string, network runtimeapi.NamespaceMode) *Pod {
	logs := n.Path("logs/" + name)
	Check(os.MkdirAll(logs, 0o755))
	p := &Pod{Node: n, config: &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "bench", Uid: name},
		Hostname:     hostname,
		LogDirectory: logs,
		DnsConfig:    &runtimeapi.DNSConfig{Servers: []string{"10.96.0.10"}},
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: n.CgroupParent(),
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Network: network, Pid: runtimeapi.NamespaceMode_CONTAINER},
				Seccomp:          &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
			},
		},
	}}
	p.Seccomp = runtimeapi.SecurityProfile_Unconfined
	answer, err := n.CRI.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: p.config, RuntimeHandler: n.Handler})
	n.check("run pod "+name, err)
	p.ID = answer.GetPodSandboxId()
	return p
}

func (n *Node) check(what string, err error) {
	if err != nil {
		Check(fmt.Errorf("%s: %s: %w", n.Name, what, err))
	}
}

// StopPod stops a pod.
func (n *Node) StopPod(ctx context.Context, id string) {
	_, err := n.CRI.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	n.check("stop pod", err)
}

// RemovePod stops and removes a pod with its containers.
func (n *Node) RemovePod(ctx context.Context, id string) {
	n.StopPod(ctx, id)
	_, err := n.CRI.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	n.check("remove pod", err)
}

// Run creates a container that runs App, starts it, and returns its id.
func (p *Pod) Run(ctx context.Context, name string) (id string) {
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name},
		Image:    &runtimeapi.ImageSpec{Image: Image},
		Command:  []string{App},
		LogPath:  name + ".log",
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources: &runtimeapi.LinuxContainerResources{CpuShares: 102, OomScoreAdj: 1000, MemoryLimitInBytes: 1 << 30},
			// As a kubelet sends them: without, a container shares the pids of its pod.
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: p.config.GetLinux().GetSecurityContext().GetNamespaceOptions(),
				Seccomp:          &runtimeapi.SecurityProfile{ProfileType: p.Seccomp},
			},
		},
	}
	answer, err := p.Node.CRI.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: p.ID, Config: config, SandboxConfig: p.config})
	p.Node.check("create container "+name, err)
	_, err = p.Node.CRI.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: answer.GetContainerId()})
	p.Node.check("start container "+name, err)
	return answer.GetContainerId()
}
