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

// Sandbox is the input of ForSandbox.
type Sandbox struct {
	ID            string
	Config        *runtimeapi.PodSandboxConfig
	Rootfs        string // with the pause program and its mount points
	EmptyDir      string
	NetNS, UserNS string // the pinned namespaces to join, "" for the host's
	CgroupsPath   string
	Machine       machine.Machine
	SELinux       SELinux // its labels (see SandboxSELinux)
	Defaults      Defaults
}

// PauseProgram is the path of the pause program in the sandbox's rootfs.
const PauseProgram = "/pause"

// ForSandbox makes the spec of a pod's pause process.
func ForSandbox(s *Sandbox) (*specs.Spec, error) {
	security := s.Config.GetLinux().GetSecurityContext()
	// Without pause the whole pod has to be made again. It only sleeps, so it gets the smallest CPU share.
	adjust := new(s.Machine.OOMScoreAdjNear(-998))
	spec := &specs.Spec{
		Version: specs.Version,
		Root:    &specs.Root{Path: s.Rootfs, Readonly: true},
		Process: &specs.Process{
			Args: []string{PauseProgram}, Cwd: "/", NoNewPrivileges: true, Capabilities: &specs.LinuxCapabilities{}, OOMScoreAdj: adjust,
			User:         specs.User{UID: uint32(security.GetRunAsUser().GetValue()), GID: uint32(security.GetRunAsGroup().GetValue())},
			SelinuxLabel: s.SELinux.Process,
		},
		// Sysctls need /proc; the empty /dev keeps the runtime from making unused device nodes.
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "bind", Source: s.EmptyDir, Options: []string{"bind", "ro", "nosuid", "noexec", "nodev"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: s.CgroupsPath, MountLabel: s.SELinux.Mount, Sysctl: s.sysctls(),
			Resources: &specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: new(uint64(2))}},
		},
		Annotations: map[string]string{"io.kubernetes.cri.container-type": "sandbox", "io.kubernetes.cri.sandbox-id": s.ID},
	}
	// Pause has no /etc/group, so supplemental_groups_policy makes no difference.
	for _, group := range security.GetSupplementalGroups() {
		spec.Process.User.AdditionalGids = append(spec.Process.User.AdditionalGids, uint32(group))
	}
	s.namespaces(spec)
	// In a user namespace the file cannot be written, but the call can be made.
	spec.Domainname = spec.Linux.Sysctl[domainName]
	delete(spec.Linux.Sysctl, domainName)
	if security.GetPrivileged() {
		return spec, nil
	}
	spec.Process.ApparmorProfile = appArmorProfile(security.GetApparmor(), s.Machine)
	err := setSeccomp(SeccompOf(security), spec, func(*specs.Spec) (*specs.LinuxSeccomp, error) { return pauseDefault(), nil })
	if err != nil {
		return nil, fmt.Errorf("make the spec of sandbox %s: %w", s.ID, err)
	}
	return spec, nil
}

// sysctls returns those of the pod's namespaces, with ids of the node. As in containerd, every user may bind low ports and send
// pings; not in the node's network, and no pings in a user namespace, which cannot write the range.
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
	if userns := UserNamespace(s.Config); userns != nil && all[pingGroups] != "" {
		all[pingGroups] = HostGroups(all[pingGroups], userns.GetGids())
	}
	return all
}

const (
	domainName = "kernel.domainname"
	pingGroups = "net.ipv4.ping_group_range"
)

// HostGroups returns a range of group ids of a user namespace as ids of the node, from which it is written. The kernel
// refuses ids that are not mapped, so the range is lowered to the mapped ones. Another text is returned as it is.
func HostGroups(text string, mappings []*runtimeapi.IDMapping) string {
	var first, last uint64
	if n, err := fmt.Sscan(text, &first, &last); n != 2 || err != nil || first > last {
		return text // such as "1 0", which is nobody
	}
	for _, m := range mappings {
		start, end := uint64(m.GetContainerId()), uint64(m.GetContainerId())+uint64(m.GetLength())
		if low, high := max(first, start), min(last+1, end); low < high {
			host := uint64(m.GetHostId())
			return fmt.Sprint(host+low-start, " ", host+high-1-start)
		}
	}
	return text
}

// HostNetwork reports whether the pod lives in the network of the node.
func HostNetwork(config *runtimeapi.PodSandboxConfig) bool {
	return namespaceOptions(config).GetNetwork() == runtimeapi.NamespaceMode_NODE
}

// UserNamespace returns the mapping of the pod's own user namespace, nil if it has none.
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

// namespaces joins those that exist, and makes those that live and die with pause.
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

// containerNamespaces joins the pod's, and makes a mount namespace and perhaps a PID namespace. On cgroup v2
// the container sees its cgroup as the root, unless it is privileged.
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
			return fmt.Errorf("join the %s namespace: its path is missing", join.kind)
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

// Defaults are what the node's configuration gives to pods and containers that say nothing else.
type Defaults struct {
	Rlimits                      []specs.POSIXRlimit
	Capabilities                 []string // those of a container that asks for none; nil is DefaultCapabilities
	Seccomp, AppArmor            string   // profiles in the CRI's text form; "" is unconfined, and runtime/default
	Env                          []string // variables as NAME=VALUE, which image and container override
	Sysctls                      map[string]string
	DeviceOwnership              bool // devices belong to run_as_user and run_as_group
	CgroupWritable               bool
	PrivilegedWithoutHostDevices bool // privileged containers have only the devices that they ask for
	// OwnSandbox: the runtime makes a sandbox for each container. It must not hear of the pod's, and knows
	// no mounts below others.
	OwnSandbox                           bool
	PodAnnotations, ContainerAnnotations []string    // patterns (path.Match) of those that the spec passes on
	Base                                 *specs.Spec // what each container's spec begins with; nil is an empty one
}

// newSpec copies the base, without what the container and the CRI decide.
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
	// Tools recognize a container's spec by these.
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

func passOn(to, annotations map[string]string, patterns []string) {
	for name, value := range annotations {
		for _, pattern := range patterns {
			if ok, err := path.Match(pattern, name); err == nil && ok {
				to[name] = value
			}
		}
	}
}
