package oci

import (
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
