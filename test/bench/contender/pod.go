package contender

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"sync"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// PodConfig is the config of a pod with a name, such as the kubelet sends.
func PodConfig(name, logs string, network runtimeapi.NamespaceMode) *runtimeapi.PodSandboxConfig {
	hostname := name
	if network == runtimeapi.NamespaceMode_NODE {
		hostname = "" // it has the node's
	}
	return &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Namespace: "bench", Uid: name},
		Hostname:     hostname,
		LogDirectory: logs,
		DnsConfig:    &runtimeapi.DNSConfig{Servers: []string{"10.96.0.10"}},
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Network: network, Pid: runtimeapi.NamespaceMode_CONTAINER},
				Seccomp:          &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
			},
		},
	}
}

// Pod is a pod of a node.
type Pod struct {
	ID   string
	Node *Node
	// Seccomp is the filter of system calls of the containers that are made from now on.
	Seccomp runtimeapi.SecurityProfile_ProfileType
	config  *runtimeapi.PodSandboxConfig
}

// RunPod runs a pod of its own network.
func (n *Node) RunPod(ctx context.Context, name string) (*Pod, error) {
	return n.RunPodIn(ctx, name, runtimeapi.NamespaceMode_POD)
}

// RunPodIn runs a pod in a network of its own, or in the node's, which takes no
// plugin.
func (n *Node) RunPodIn(ctx context.Context, name string, network runtimeapi.NamespaceMode) (*Pod, error) {
	logs := filepath.Join(n.logs(), name)
	Check(os.MkdirAll(logs, 0o755))
	p := &Pod{Node: n, Seccomp: runtimeapi.SecurityProfile_Unconfined, config: PodConfig(name, logs, network)}
	p.config.Linux.CgroupParent = n.cgroupParent()
	answer, err := n.CRI.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: p.config, RuntimeHandler: n.handler})
	p.ID = answer.GetPodSandboxId()
	if err != nil {
		return nil, fmt.Errorf("%s: run pod %s: %w", n.Name, name, err)
	}
	return p, nil
}

// RunHostPod runs a pod in the network of the node, and returns its id.
func (n *Node) RunHostPod(ctx context.Context, name string) (string, error) {
	p := Must(n.RunPodIn(ctx, name, runtimeapi.NamespaceMode_NODE))
	return p.ID, nil
}

// RemovePod stops and removes a pod with its containers.
func (n *Node) RemovePod(ctx context.Context, id string) error {
	Must(n.CRI.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id}))
	_, err := n.CRI.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	return err
}

// Create makes a container that runs a command, and returns its id.
func (p *Pod) Create(ctx context.Context, name string, command ...string) (string, error) {
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name},
		Image:    &runtimeapi.ImageSpec{Image: Image},
		Command:  command,
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
	request := &runtimeapi.CreateContainerRequest{PodSandboxId: p.ID, Config: config, SandboxConfig: p.config}
	answer, err := p.Node.CRI.CreateContainer(ctx, request)
	if err != nil {
		return "", fmt.Errorf("%s: create container %s: %w", p.Node.Name, name, err)
	}
	return answer.GetContainerId(), nil
}

// StartContainer lets a created container run.
func (n *Node) StartContainer(ctx context.Context, id string) error {
	_, err := n.CRI.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: id})
	if err != nil {
		return fmt.Errorf("%s: start container: %w", n.Name, err)
	}
	return nil
}

// Run creates and starts a container.
func (p *Pod) Run(ctx context.Context, name string, command ...string) (string, error) {
	id := Must(p.Create(ctx, name, command...))
	return id, p.Node.StartContainer(ctx, id)
}

// grace is a stop's, in seconds. What benchmarks stop ends at once.
const grace = 10

// StopContainer stops a container.
func (n *Node) StopContainer(ctx context.Context, id string) error {
	if _, err := n.CRI.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: grace}); err != nil {
		return fmt.Errorf("%s: stop container: %w", n.Name, err)
	}
	return nil
}

// RemoveContainer removes a container that is stopped.
func (n *Node) RemoveContainer(ctx context.Context, id string) error {
	if _, err := n.CRI.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: id}); err != nil {
		return fmt.Errorf("%s: remove container: %w", n.Name, err)
	}
	return nil
}

// InFlight is how many calls Parallel makes at once.
const InFlight = 10

// Parallel calls do for 0 to n-1, several at a time, and returns the first
// error.
func Parallel(n int, do func(int) error) error { return Burst(n, InFlight, do) }

// Burst is Parallel with so many at a time.
func Burst(n, atOnce int, do func(int) error) error {
	slots := make(chan struct{}, atOnce)
	errs := make([]error, n)
	var wait sync.WaitGroup
	for i := range n {
		slots <- struct{}{}
		wait.Go(func() {
			defer func() { <-slots }()
			errs[i] = Catch(func() error { return do(i) })
		})
	}
	wait.Wait()
	for _, err := range errs {
		if err != nil {
			return err
		}
	}
	return nil
}
