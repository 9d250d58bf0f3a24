package oci

import (
	"fmt"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
)

// Sandbox is what the spec of a pod's pause process is made from.
type Sandbox struct {
	ID     string
	Config *runtimeapi.PodSandboxConfig
	// Rootfs holds the pause program and the mount points that it needs.
	Rootfs string
	// EmptyDir is an empty directory that is mounted where there is nothing.
	EmptyDir string
	// OwnDevices: the runtime gets a /dev that it can fill.
	OwnDevices bool
	// NetNS and UserNS are the pinned namespaces to join, "" for the host's.
	NetNS, UserNS string
	// CgroupsPath is where the pause process is accounted (see CgroupsPath).
	CgroupsPath string
	Machine     machine.Machine
	// SELinux are the labels that were made for it (see SandboxSELinux).
	SELinux SELinux
	// Defaults are those of the node.
	Defaults Defaults
}

// PauseProgram is the path of the pause program in the sandbox's rootfs.
const PauseProgram = "/pause"

type sandboxRule func(*Sandbox, *specs.Spec) error

func sandboxRules() []sandboxRule {
	return []sandboxRule{
		sandboxProcess,
		sandboxUser,
		sandboxMounts,
		sandboxNamespaces,
		sandboxSysctls,
		sandboxResources,
		sandboxSeccomp,
		sandboxAppArmor,
		sandboxSELinux,
	}
}

// ForSandbox makes the spec of a pod's pause process.
func ForSandbox(s *Sandbox) (*specs.Spec, error) {
	spec := &specs.Spec{
		Version:     specs.Version,
		Root:        &specs.Root{Path: s.Rootfs, Readonly: true},
		Process:     &specs.Process{},
		Linux:       &specs.Linux{CgroupsPath: s.CgroupsPath},
		Annotations: map[string]string{"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": s.ID},
	}
	for _, rule := range sandboxRules() {
		if err := rule(s, spec); err != nil {
			return nil, fmt.Errorf("the spec of sandbox %s: %w", s.ID, err)
		}
	}
	return spec, nil
}

func (s *Sandbox) security() *runtimeapi.LinuxSandboxSecurityContext {
	return s.Config.GetLinux().GetSecurityContext()
}

// HostNetwork reports whether the pod lives in the network of the node.
func HostNetwork(config *runtimeapi.PodSandboxConfig) bool {
	return namespaceOptions(config).GetNetwork() == runtimeapi.NamespaceMode_NODE
}

// UserNamespace is the mapping of the pod's own user namespace, nil when it
// lives in that of the node.
func UserNamespace(config *runtimeapi.PodSandboxConfig) *runtimeapi.UserNamespace {
	options := namespaceOptions(config).GetUsernsOptions()
	if options == nil || options.GetMode() != runtimeapi.NamespaceMode_POD {
		return nil
	}
	return options
}

func namespaceOptions(config *runtimeapi.PodSandboxConfig) *runtimeapi.NamespaceOption {
	return config.GetLinux().GetSecurityContext().GetNamespaceOptions()
}
