package oci

import (
	"cmp"
	"encoding/json"
	"fmt"
	"maps"
	"path"

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

// ForSandbox makes the spec of a pod's pause process.
func ForSandbox(s *Sandbox) (*specs.Spec, error) {
	security := s.Config.GetLinux().GetSecurityContext()
	// Pause is one of the last processes to be killed: with it the whole pod would have
	// to be made again. It only sleeps, so it has the least weight there is.
	adjust := s.Machine.OOMScoreAdjNear(-998)
	shares := uint64(2)
	spec := &specs.Spec{
		Version: specs.Version,
		Root:    &specs.Root{Path: s.Rootfs, Readonly: true},
		Process: &specs.Process{
			Args: []string{PauseProgram}, Cwd: "/", NoNewPrivileges: true, Capabilities: &specs.LinuxCapabilities{}, OOMScoreAdj: &adjust,
			User:         specs.User{UID: uint32(security.GetRunAsUser().GetValue()), GID: uint32(security.GetRunAsGroup().GetValue())},
			SelinuxLabel: s.SELinux.Process,
		},
		// Setting sysctls needs /proc; an empty directory over /dev keeps the runtime from
		// making unused device nodes.
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "bind", Source: s.EmptyDir, Options: []string{"bind", "ro", "nosuid", "noexec", "nodev"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: s.CgroupsPath, MountLabel: s.SELinux.Mount, Sysctl: s.sysctls(),
			Resources: &specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: &shares}},
		},
		Annotations: map[string]string{"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": s.ID},
	}
	// Pause has no /etc/group to look into, so only the groups that are listed count,
	// whatever supplemental_groups_policy says.
	for _, group := range security.GetSupplementalGroups() {
		spec.Process.User.AdditionalGids = append(spec.Process.User.AdditionalGids, uint32(group))
	}
	s.namespaces(spec)
	if security.GetPrivileged() {
		return spec, nil
	}
	spec.Process.ApparmorProfile = appArmorProfile(security.GetApparmor(), s.Machine)
	err := setSeccomp(SeccompOf(security), spec, func(*specs.Spec) (*specs.LinuxSeccomp, error) { return pauseDefault(), nil })
	if err != nil {
		return nil, fmt.Errorf("the spec of sandbox %s: %w", s.ID, err)
	}
	return spec, nil
}

// sysctls are those of the pod's namespaces. Every user of the pod may bind low ports and send
// pings, as in containerd; not in the node's network, and no pings in a user namespace, where
// the group range could not be written.
func (s *Sandbox) sysctls() map[string]string {
	all := make(map[string]string)
	if s.NetNS != "" {
		all["net.ipv4.ip_unprivileged_port_start"] = "0"
		if s.UserNS == "" {
			all["net.ipv4.ping_group_range"] = "0 2147483647"
		}
	}
	for name, value := range s.Defaults.Sysctls {
		if OwnsSysctl(s.Config, name) {
			all[SysctlName(name)] = value
		}
	}
	for name, value := range s.Config.GetLinux().GetSysctls() {
		all[SysctlName(name)] = value
	}
	return all
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

// namespaces makes those that live and die with pause, and joins those that were made before it.
// A pod in the node's network has the node's host name. The mappings of a user namespace that is
// joined are the namespace's own.
func (s *Sandbox) namespaces(spec *specs.Spec) {
	options, node := namespaceOptions(s.Config), runtimeapi.NamespaceMode_NODE
	spec.Linux.Namespaces = []specs.LinuxNamespace{{Type: specs.MountNamespace}}
	for _, n := range []struct {
		kind specs.LinuxNamespaceType
		path string
		want bool
	}{
		{specs.UserNamespace, s.UserNS, s.UserNS != ""},
		{specs.NetworkNamespace, s.NetNS, s.NetNS != ""},
		{specs.UTSNamespace, "", options.GetNetwork() != node},
		{specs.IPCNamespace, "", options.GetIpc() != node},
		{specs.PIDNamespace, "", options.GetPid() != node},
	} {
		if n.want {
			spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: n.kind, Path: n.path})
		}
	}
	if !HostNetwork(s.Config) {
		spec.Hostname = s.Config.GetHostname()
	}
}

// containerNamespaces: a mount namespace of its own, those of the pod, and the pid namespace
// that it asks for. On cgroup v2 it sees its own cgroup as the root, unless it is privileged.
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

// Defaults are what the node's configuration gives to pods and containers that do not say
// otherwise.
type Defaults struct {
	// Rlimits are by resource; others are as in defaultRlimits.
	Rlimits []specs.POSIXRlimit
	// Capabilities are those of a container that asks for none; nil: DefaultCapabilities.
	Capabilities []string
	// Seccomp and AppArmor are for containers that ask for none, as the CRI has them in a text;
	// "" is unconfined, and runtime/default.
	Seccomp, AppArmor string
	// Env are variables, as NAME=VALUE; image and container have the last word.
	Env []string
	// Sysctls are left out where a pod shares the namespace with the node.
	Sysctls map[string]string
	// DeviceOwnership gives devices to run_as_user and run_as_group.
	DeviceOwnership bool
	// CgroupWritable lets a container write to its own cgroup (version 2).
	CgroupWritable bool
	// PrivilegedWithoutHostDevices: a privileged container has only the devices that it asks
	// for.
	PrivilegedWithoutHostDevices bool
	// OwnSandbox: the runtime makes a sandbox for each container: it is not told of one for the
	// pod, and its file system knows no mounts below others.
	OwnSandbox bool
	// PodAnnotations and ContainerAnnotations are patterns (path.Match) of what is passed on in
	// the spec.
	PodAnnotations, ContainerAnnotations []string
	// Base is what each container's spec begins with, nil for an empty one.
	Base *specs.Spec
}

// newSpec is the base, without what is for the container and the CRI to say.
func (c *Container) newSpec() (*specs.Spec, error) {
	spec := &specs.Spec{}
	if base := c.Defaults.Base; base != nil {
		encoded, err := json.Marshal(base)
		if err == nil {
			err = json.Unmarshal(encoded, spec)
		}
		if err != nil {
			return nil, fmt.Errorf("copy the base spec: %w", err)
		}
	}
	if spec.Process == nil {
		spec.Process = &specs.Process{}
	}
	if spec.Linux == nil {
		spec.Linux = &specs.Linux{}
	}
	spec.Version = specs.Version
	spec.Root = &specs.Root{Path: c.Rootfs, Readonly: c.security().GetReadonlyRootfs()}
	spec.Hostname, spec.Domainname = "", ""
	spec.Process.ApparmorProfile, spec.Process.SelinuxLabel, spec.Linux.MountLabel = "", c.SELinux.Process, c.SELinux.Mount
	spec.Linux.Seccomp, spec.Linux.RootfsPropagation, spec.Linux.CgroupsPath = nil, "", c.CgroupsPath
	if spec.Annotations == nil {
		spec.Annotations = make(map[string]string)
	}
	passOn(spec.Annotations, c.Pod.GetAnnotations(), c.Defaults.PodAnnotations)
	passOn(spec.Annotations, c.Config.GetAnnotations(), c.Defaults.ContainerAnnotations)
	// Tools know a container's spec by these.
	pod, image := c.Pod.GetMetadata(), c.Config.GetImage()
	maps.Copy(spec.Annotations, map[string]string{
		"io.kubernetes.cri.container-type":    "container",
		"io.kubernetes.cri.sandbox-id":        c.SandboxID,
		"io.kubernetes.cri.sandbox-name":      pod.GetName(),
		"io.kubernetes.cri.sandbox-namespace": pod.GetNamespace(),
		"io.kubernetes.cri.sandbox-uid":       pod.GetUid(),
		"io.kubernetes.cri.container-name":    c.Config.GetMetadata().GetName(),
		"io.kubernetes.cri.image-name":        cmp.Or(image.GetUserSpecifiedImage(), image.GetImage()),
	})
	if c.Defaults.OwnSandbox {
		delete(spec.Annotations, "io.kubernetes.cri.container-type")
	}
	return spec, nil
}

// passOn copies the annotations whose names match one of the patterns.
func passOn(to, annotations map[string]string, patterns []string) {
	for name, value := range annotations {
		for _, pattern := range patterns {
			if ok, err := path.Match(pattern, name); err == nil && ok {
				to[name] = value
			}
		}
	}
}
