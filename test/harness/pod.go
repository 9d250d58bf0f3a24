package harness

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// callTime limits the calls that the harness makes itself.
const callTime = 3 * time.Minute

// PodOption changes a pod's configuration. Any function of this form is one.
type PodOption func(*runtimeapi.PodSandboxConfig)

// PodConfig returns the configuration of a pod as a kubelet would send it, with
// namespaces of its own. The uid follows from the name: the same name is the
// same pod.
func (n *Node) PodConfig(name string, opts ...PodOption) *runtimeapi.PodSandboxConfig {
	const namespace = "test"
	uid := "uid-" + name
	config := &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: name, Uid: uid, Namespace: namespace},
		Hostname:     name,
		LogDirectory: filepath.Join(n.Logs, fmt.Sprintf("%s_%s_%s", namespace, name, uid)),
		Labels:       map[string]string{"io.kubernetes.pod.name": name},
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: n.CgroupParent,
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{
					Network: runtimeapi.NamespaceMode_POD,
					Pid:     runtimeapi.NamespaceMode_CONTAINER,
					Ipc:     runtimeapi.NamespaceMode_POD,
				},
			},
		},
	}
	for _, option := range opts {
		option(config)
	}
	return config
}

// HostNetwork puts a pod into the node's network namespace.
func HostNetwork() PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.Hostname = "" // a kubelet sends none then
		c.Linux.SecurityContext.NamespaceOptions.Network = runtimeapi.NamespaceMode_NODE
	}
}

// HostPort leads a TCP port of the node to one of the pod. The node needs
// [PortMap].
func HostPort(host, pod int32) PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		mapping := &runtimeapi.PortMapping{Protocol: runtimeapi.Protocol_TCP, HostPort: host, ContainerPort: pod}
		c.PortMappings = append(c.PortMappings, mapping)
	}
}

// UserNamespace gives a pod 65536 users of its own.
func UserNamespace(c *runtimeapi.PodSandboxConfig) {
	mapping := []*runtimeapi.IDMapping{{ContainerId: 0, HostId: 200000, Length: 65536}}
	c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: mapping, Gids: mapping}
}

// Attempt is the pod's number of earlier sandboxes.
func Attempt(number uint32) PodOption {
	return func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Attempt = number }
}

// RunPod runs a pod and returns its id. An error fails the test.
func (n *Node) RunPod(config *runtimeapi.PodSandboxConfig) string {
	n.t.Helper()
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	answer, err := n.Runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config, RuntimeHandler: n.options.handler})
	n.must("running pod "+config.GetMetadata().GetName(), err)
	return answer.PodSandboxId
}

// RemovePod stops a pod and removes it. An error fails the test.
func (n *Node) RemovePod(id string) {
	n.t.Helper()
	n.must("removing pod "+id, n.removePod(id))
}

func (n *Node) removePod(id string) error {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	if _, err := n.Runtime.StopPodSandbox(ctx, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("StopPodSandbox %s: %w", id, err)
	}
	if _, err := n.Runtime.RemovePodSandbox(ctx, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id}); err != nil {
		return fmt.Errorf("RemovePodSandbox %s: %w", id, err)
	}
	return nil
}

func (n *Node) removePods() error {
	ctx, cancel := context.WithTimeout(context.Background(), callTime)
	defer cancel()
	list, err := n.Runtime.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})
	if err != nil {
		return fmt.Errorf("ListPodSandbox: %w", err)
	}
	for _, pod := range list.Items {
		if err := n.removePod(pod.Id); err != nil {
			return err
		}
	}
	return nil
}
