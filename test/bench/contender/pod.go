package contender

import (
	"context"
	"fmt"
	"os"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

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
