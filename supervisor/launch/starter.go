package launch

import (
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/userns"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// ExecNeedsStarter says why only libcontainer can start a process, "" if a launch can.
func ExecNeedsStarter(spec *specs.Spec, p *specs.Process) string {
	switch {
	case p.Terminal:
		return "a terminal, which is made in the container"
	case len(p.Args) == 0:
		return "no program"
	case spec.Linux == nil || spec.Linux.Personality != nil || spec.Linux.MemoryPolicy != nil || spec.Linux.IntelRdt != nil:
		return "settings of the process"
	}
	mounts := false
	for _, n := range spec.Linux.Namespaces {
		if namespaceFlags[n.Type] == 0 {
			return "a namespace of type " + string(n.Type)
		}
		mounts = mounts || n.Type == specs.MountNamespace
	}
	if !mounts {
		return "the mount namespace of the node"
	}
	if needsPasswd(spec, p) {
		return "an /etc/passwd on a volume, which is read in the container"
	}
	why := rareSettings(p)
	if why == "" && spec.Process != nil {
		why = rareSettings(spec.Process)
	}
	return why + filterNeedsStarter(spec.Linux.Seccomp)
}

func rareSettings(p *specs.Process) string {
	if p.Scheduler != nil || p.IOPriority != nil || p.ExecCPUAffinity != nil {
		return "priorities and processors"
	}
	return ""
}

// PauseNeedsStarter says why only libcontainer can make a pause, "" if a launch can.
// What few pauses need is left to it.
func PauseNeedsStarter(spec *specs.Spec, streams [3]*os.File, terminal bool) string {
	switch {
	case spec.Root == nil || spec.Process == nil || spec.Linux == nil:
		return "a specification without root, process or linux"
	case userns.RunningInUserNS():
		// There options of the node's mounts cannot be removed (mount_namespaces(7),
		// "Restrictions on mount namespaces"), which libcontainer finds out mount by mount.
		return "a node in a user namespace"
	case terminal || slices.ContainsFunc(streams[:], hasOwner):
		return "streams: they are given to the user of the process"
	}
	for _, why := range []string{
		pauseProcess(spec.Process), pauseNamespaces(spec.Linux.Namespaces), pauseMounts(spec), pauseSettings(spec),
		cgroupsNeedStarter(spec), filterNeedsStarter(spec.Linux.Seccomp),
	} {
		if why != "" {
			return why
		}
	}
	return ""
}

// hasOwner reports whether the owner of the stream matters: it can be opened anew
// by its name in /proc/self/fd, which sockets cannot (proc_pid_fd(5)).
func hasOwner(stream *os.File) bool {
	if stream == nil {
		return false
	}
	info, err := stream.Stat()
	return err != nil || info.Mode()&os.ModeSocket == 0
}

func pauseProcess(p *specs.Process) string {
	switch {
	case p.Terminal:
		return "a terminal"
	case len(p.Args) == 0 || !filepath.IsAbs(p.Args[0]):
		return "a program that has to be looked for"
	case p.Cwd != "/":
		return "a working directory, which may have to be made"
	case len(p.Env) > 0:
		return "an environment"
	case !p.NoNewPrivileges:
		return "privileges that it may get: its filter is then loaded while it still has its own"
	case p.Capabilities == nil || len(slices.Concat(p.Capabilities.Bounding, p.Capabilities.Effective, p.Capabilities.Inheritable, p.Capabilities.Permitted, p.Capabilities.Ambient)) > 0:
		return "capabilities"
	case len(p.Rlimits) > 0 || p.User.Umask != nil:
		return "limits, or a umask"
	case p.SelinuxLabel != "" || p.ApparmorProfile != "":
		return "labels of SELinux or a profile of AppArmor"
	}
	return rareSettings(p)
}

// pauseNamespaces: where others are, or a user namespace has to be entered first,
// nothing is launched.
func pauseNamespaces(namespaces []specs.LinuxNamespace) string {
	mounts := false
	for _, n := range namespaces {
		switch n.Type {
		case specs.MountNamespace, specs.UTSNamespace, specs.IPCNamespace, specs.PIDNamespace:
			if n.Path != "" {
				return "a namespace that is joined: " + string(n.Type)
			}
			mounts = mounts || n.Type == specs.MountNamespace
		case specs.NetworkNamespace:
			if n.Path == "" {
				return "a network namespace of its own"
			}
		default:
			return "a namespace of type " + string(n.Type)
		}
	}
	if !mounts {
		return "the mount namespace of the node"
	}
	return ""
}

// pauseMounts: proc and plain binds onto directories that are there, in a root
// that only the node can write to.
func pauseMounts(spec *specs.Spec) string {
	proc := false
	for _, m := range spec.Mounts {
		flags, known := flagsOf(m)
		switch {
		case m.Type != "proc" && flags&unix.MS_BIND == 0:
			return "a mount of type " + m.Type
		case !known || len(m.UIDMappings)+len(m.GIDMappings) > 0:
			return "options of the mount on " + m.Destination
		}
		proc = proc || m.Type == "proc" && m.Destination == "/proc"
	}
	switch {
	case !proc:
		return "no /proc"
	case !spec.Root.Readonly || spec.Linux.RootfsPropagation != "":
		return "a root that is not read-only and private"
	case len(spec.Linux.MaskedPaths)+len(spec.Linux.ReadonlyPaths) > 0:
		return "masked paths"
	}
	return ""
}

func pauseSettings(spec *specs.Spec) string {
	l := spec.Linux
	switch {
	case spec.Hooks != nil:
		return "hooks"
	case l.MountLabel != "":
		return "labels of SELinux"
	case len(l.NetDevices)+len(l.Devices) > 0:
		return "devices"
	case spec.Domainname != "" || l.Personality != nil:
		return "settings of the process"
	case l.IntelRdt != nil || l.MemoryPolicy != nil || len(l.TimeOffsets) > 0:
		return "resources besides cgroups"
	}
	return ""
}

// cgroupsNeedStarter says what a pause's cgroups are asked for that only libcontainer
// translates.
func cgroupsNeedStarter(spec *specs.Spec) string {
	r := spec.Linux.Resources
	if r == nil {
		return ""
	}
	cpu, memory := r.CPU, r.Memory
	switch {
	case len(r.Devices)+len(r.HugepageLimits)+len(r.Rdma)+len(r.Unified) > 0 || r.BlockIO != nil || r.Network != nil,
		cpu != nil && *cpu != (specs.LinuxCPU{Shares: cpu.Shares}),
		memory != nil && *memory != (specs.LinuxMemory{Limit: memory.Limit}):
		return "resources of a pause"
	}
	for name := range spec.Annotations {
		if strings.HasPrefix(name, "org.systemd.property.") {
			return "properties of systemd"
		}
	}
	return ""
}

// filterNeedsStarter: another process can decide on calls only if it gets a descriptor of
// the filter.
func filterNeedsStarter(profile *specs.LinuxSeccomp) string {
	if profile == nil {
		return ""
	}
	notify := profile.DefaultAction == specs.ActNotify || profile.ListenerPath != ""
	for _, call := range profile.Syscalls {
		notify = notify || call.Action == specs.ActNotify
	}
	if notify {
		return "a seccomp profile that asks another process"
	}
	return ""
}
