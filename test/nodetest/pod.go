package nodetest

import (
	"context"
	"encoding/json"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// callTime limits the calls that the harness makes itself.
const callTime = 3 * time.Minute

// PodOption changes a pod's configuration. Any function of this form is one.
type PodOption func(*runtimeapi.PodSandboxConfig)

// PodConfig returns the configuration of a pod as a kubelet would send it, with namespaces of its own. The
// uid follows from the name: the same name is the same pod.
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
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{ // the other namespaces' modes are POD, which is 0
				NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
			},
		},
	}
	for _, option := range opts {
		option(config)
	}
	return config
}

// GoodPod asks for all that a pod can ask for at once.
func GoodPod() *runtimeapi.PodSandboxConfig {
	return &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "web-0", Namespace: "default", Uid: "3f0c-11", Attempt: 1},
		Hostname: "web-0.example", LogDirectory: "/var/log/pods/default_web-0_3f0c-11",
		DnsConfig: &runtimeapi.DNSConfig{Servers: []string{"10.96.0.10", "fd00::a"}, Searches: []string{"svc.local"}, Options: []string{"ndots:5"}},
		PortMappings: []*runtimeapi.PortMapping{
			{Protocol: runtimeapi.Protocol_TCP, ContainerPort: 80, HostPort: 8080},
			{Protocol: runtimeapi.Protocol_UDP, ContainerPort: 53, HostPort: 65535, HostIp: "127.0.0.1"},
			{Protocol: runtimeapi.Protocol_SCTP, ContainerPort: 65535, HostIp: "::1"},
			{},
		},
		Labels:      map[string]string{"app": "web", "": ""},
		Annotations: map[string]string{"kubernetes.io/ingress-bandwidth": "10M", "kubernetes.io/egress-bandwidth": "1Gi", "any": "thing\n"},
		Linux: &runtimeapi.LinuxPodSandboxConfig{
			CgroupParent: "/kubepods/pod3f0c",
			Sysctls:      map[string]string{"net.core.somaxconn": "512", "kernel.shm_rmid_forced": "1"},
			SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
				RunAsUser: &runtimeapi.Int64Value{Value: 1000}, RunAsGroup: &runtimeapi.Int64Value{Value: 0},
				SupplementalGroups:       []int64{0, math.MaxUint32 - 1},
				SupplementalGroupsPolicy: runtimeapi.SupplementalGroupsPolicy_Strict,
				Seccomp:                  &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
				Apparmor:                 &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault},
				NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER, UsernsOptions: &runtimeapi.UserNamespace{
					Mode: runtimeapi.NamespaceMode_POD, Uids: IDs(0, 65536, 1000, 2000, 100000, 10), Gids: IDs(0, 65536, 65536),
				}},
			},
		},
	}
}

// IDs makes mappings of container id, host id and length, three by three.
func IDs(numbers ...uint32) (mappings []*runtimeapi.IDMapping) {
	for of := range slices.Chunk(numbers, 3) {
		mappings = append(mappings, &runtimeapi.IDMapping{ContainerId: of[0], HostId: of[1], Length: of[2]})
	}
	return mappings
}

// HostNetwork puts a pod into the node's network namespace.
func HostNetwork() PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.Hostname = "" // a kubelet sends none then
		c.Linux.SecurityContext.NamespaceOptions.Network = runtimeapi.NamespaceMode_NODE
	}
}

// HostPort leads a TCP port of the node to one of the pod. The node needs [PortMap].
func HostPort(host, pod int32) PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.PortMappings = append(c.PortMappings, &runtimeapi.PortMapping{Protocol: runtimeapi.Protocol_TCP, HostPort: host, ContainerPort: pod})
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
	answer, err := n.Runtime.RunPodSandbox(harness.Limited(n.t), &runtimeapi.RunPodSandboxRequest{Config: config, RuntimeHandler: n.options.handler})
	n.must("running pod "+config.GetMetadata().GetName(), err)
	return answer.PodSandboxId
}

// RemovePod stops a pod and removes it. An error fails the test.
func (n *Node) RemovePod(id string) { n.must("removing pod "+id, n.removePod(id)) }

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

// Container is the configuration of a container of BusyboxImage as a kubelet would send it, without a command
// of its own if there is none.
func Container(name string, command ...string) *runtimeapi.ContainerConfig {
	return &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name},
		Image:    &runtimeapi.ImageSpec{Image: BusyboxImage},
		Command:  command,
		LogPath:  name + ".log",
		Linux: &runtimeapi.LinuxContainerConfig{
			Resources: &runtimeapi.LinuxContainerResources{},
			SecurityContext: &runtimeapi.LinuxContainerSecurityContext{
				NamespaceOptions: &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER},
			},
		},
	}
}

// CreateContainer makes a container in a pod, and returns its id.
func (n *Node) CreateContainer(pod string, of *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) (id string, err error) {
	answer, err := n.Runtime.CreateContainer(harness.Limited(n.t), &runtimeapi.CreateContainerRequest{PodSandboxId: pod, SandboxConfig: of, Config: c})
	return answer.GetContainerId(), err
}

// RunContainer makes a container and starts it. An error fails the test.
func (n *Node) RunContainer(pod string, of *runtimeapi.PodSandboxConfig, c *runtimeapi.ContainerConfig) (id string) {
	id, err := n.CreateContainer(pod, of, c)
	n.must("creating container "+c.GetMetadata().GetName(), err)
	_, err = n.Runtime.StartContainer(harness.Limited(n.t), &runtimeapi.StartContainerRequest{ContainerId: id})
	n.must("starting container "+c.GetMetadata().GetName(), err)
	return id
}

// Hook is a hook of the runtime-spec that is a shell script.
type Hook struct {
	Kind, Script string
	Seconds      int // its time-out, 0 for none
}

// CDIDevice gives the node a device of a vendor's (CDI) that has hooks, until the test ends, and returns its name.
func CDIDevice(t testing.TB, hooks ...Hook) (name string) {
	const dir = "/var/run/cdi"
	harness.Check(t, os.MkdirAll(dir, 0o755))
	kind := fmt.Sprintf("test%d", time.Now().UnixNano())
	var list []Object
	for _, h := range hooks {
		hook := Object{"hookName": h.Kind, "path": "/bin/sh", "args": []string{"sh", "-c", h.Script}}
		if h.Seconds > 0 {
			hook["timeout"] = h.Seconds
		}
		list = append(list, hook)
	}
	data, err := json.Marshal(Object{
		"cdiVersion": "0.6.0", "kind": "vendor.example/" + kind,
		"devices": []Object{{"name": "0", "containerEdits": Object{"hooks": list}}},
	})
	harness.Check(t, err)
	file := filepath.Join(dir, kind+".json")
	harness.Check(t, os.WriteFile(file, data, 0o644))
	t.Cleanup(func() { harness.Check(t, os.Remove(file)) }) // the directory stays: another test may be about to write there
	return "vendor.example/" + kind + "=0"
}
