package oci

import (
	"fmt"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// sandboxNamespaces makes the namespaces that live and die with pause, and
// joins those that were made before it. A pod in the node's network also lives
// with the node's host name. With the pid mode CONTAINER each container gets a
// pid namespace, and so does pause. The mappings of a user namespace that is
// joined are the namespace's own: the runtime reads them there.
func sandboxNamespaces(s *Sandbox, spec *specs.Spec) error {
	options := namespaceOptions(s.Config)
	spec.Linux.Namespaces = []specs.LinuxNamespace{{Type: specs.MountNamespace}}
	add := func(kind specs.LinuxNamespaceType, path string) {
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: kind, Path: path})
	}
	if s.UserNS != "" {
		add(specs.UserNamespace, s.UserNS)
	}
	if s.NetNS != "" {
		add(specs.NetworkNamespace, s.NetNS)
	}
	if !HostNetwork(s.Config) {
		add(specs.UTSNamespace, "")
		spec.Hostname = s.Config.GetHostname()
	}
	if options.GetIpc() != runtimeapi.NamespaceMode_NODE {
		add(specs.IPCNamespace, "")
	}
	if options.GetPid() != runtimeapi.NamespaceMode_NODE {
		add(specs.PIDNamespace, "")
	}
	return nil
}

// containerNamespaces: a mount namespace of its own; the network, IPC, UTS and user
// namespaces of the pod; the pid namespace that it asks for, which for the pod's is
// the node's where the pod has that. On cgroup v2 a container sees its own cgroup as
// the root, unless it is privileged.
func containerNamespaces(c *Container, spec *specs.Spec) error {
	spec.Linux.Namespaces = []specs.LinuxNamespace{{Type: specs.MountNamespace}}
	pod, node := namespaceOptions(c.Pod), runtimeapi.NamespaceMode_NODE
	pid := c.security().GetNamespaceOptions().GetPid()
	for _, join := range []struct {
		kind specs.LinuxNamespaceType
		path string
		want bool
	}{
		{specs.UserNamespace, c.Namespaces.User, UserNamespace(c.Pod) != nil},
		{specs.NetworkNamespace, c.Namespaces.Net, pod.GetNetwork() != node},
		{specs.UTSNamespace, c.Namespaces.UTS, pod.GetNetwork() != node},
		{specs.IPCNamespace, c.Namespaces.IPC, pod.GetIpc() != node},
		{specs.PIDNamespace, c.Namespaces.PID, pid == runtimeapi.NamespaceMode_POD && pod.GetPid() != node || pid == runtimeapi.NamespaceMode_TARGET},
	} {
		if !join.want {
			continue
		}
		if join.path == "" {
			return fmt.Errorf("no path of the %s namespace to join", join.kind)
		}
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: join.kind, Path: join.path})
	}
	if pid == runtimeapi.NamespaceMode_CONTAINER {
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.PIDNamespace})
	}
	if c.Machine.CgroupV2 && !c.security().GetPrivileged() {
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.CgroupNamespace})
	}
	return nil
}
