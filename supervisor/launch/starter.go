package launch

import (
	"path/filepath"
	"reflect"
	"slices"
	"strings"

	"github.com/moby/sys/userns"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// CanExec reports whether a launch can start a process of a container; else
// libcontainer does, in a starter. A terminal is made in the container, and where nothing
// says HOME its /etc/passwd is read there.
func CanExec(spec *specs.Spec, p *specs.Process) bool {
	return len(p.Args) > 0 && !p.Terminal && !hasRareSettings(p) &&
		spec.Linux != nil && spec.Linux.Personality == nil && spec.Linux.MemoryPolicy == nil && spec.Linux.IntelRdt == nil &&
		(spec.Process == nil || !hasRareSettings(spec.Process)) &&
		hasOwnMounts(spec.Linux.Namespaces) && valueOf(p.Env, "HOME") != "" && !asksAnother(spec.Linux.Seccomp)
}

func hasRareSettings(p *specs.Process) bool {
	return p.Scheduler != nil || p.IOPriority != nil || p.ExecCPUAffinity != nil
}

// hasOwnMounts reports whether there is a mount namespace, and none of a kind that a
// launch does not know.
func hasOwnMounts(namespaces []specs.LinuxNamespace) (mounts bool) {
	for _, n := range namespaces {
		if namespaceFlags[n.Type] == 0 {
			return false
		}
		mounts = mounts || n.Type == specs.MountNamespace
	}
	return mounts
}

// CanPause is CanExec of a pause. What few pauses need is left to libcontainer, and all
// that a launch does not know. (In a user namespace options of the node's mounts cannot
// be removed (mount_namespaces(7), "Restrictions on mount namespaces"), which
// libcontainer finds out mount by mount.)
func CanPause(spec *specs.Spec) bool {
	return spec.Root != nil && spec.Process != nil && spec.Linux != nil && !userns.RunningInUserNS() &&
		isPlain(spec) && hasPlainProcess(spec.Process) && hasPlainCgroups(spec) &&
		hasOwnMounts(spec.Linux.Namespaces) && !slices.ContainsFunc(spec.Linux.Namespaces, isOthers) &&
		hasPlainMounts(spec) && !asksAnother(spec.Linux.Seccomp)
}

// isPlain reports whether a specification has nothing but what a launch does, or what is
// looked at elsewhere.
func isPlain(spec *specs.Spec) bool {
	rest, linux := *spec, *spec.Linux
	rest.Version, rest.Root, rest.Process, rest.Linux, rest.Hostname, rest.Mounts, rest.Annotations = "", nil, nil, nil, "", nil, nil
	linux.CgroupsPath, linux.Namespaces, linux.Resources, linux.Seccomp, linux.Sysctl = "", nil, nil, nil, nil
	return reflect.DeepEqual(rest, specs.Spec{}) && reflect.DeepEqual(linux, specs.Linux{})
}

// hasPlainProcess: with no_new_privs, or its filter would be loaded while it still has
// its own privileges.
func hasPlainProcess(p *specs.Process) bool {
	rest := *p
	rest.Args, rest.OOMScoreAdj, rest.User = nil, nil, specs.User{Umask: p.User.Umask}
	plain := specs.Process{Cwd: "/", NoNewPrivileges: true, Capabilities: &specs.LinuxCapabilities{}}
	return len(p.Args) > 0 && filepath.IsAbs(p.Args[0]) && reflect.DeepEqual(rest, plain)
}

// isOthers reports whether a namespace is one that others are in, but for the pod's
// network, or a new network, which has no loopback device yet.
func isOthers(n specs.LinuxNamespace) bool {
	return (n.Path != "") != (n.Type == specs.NetworkNamespace) || n.Type == specs.CgroupNamespace
}

// hasPlainMounts: proc and plain binds onto directories that are there, in a root
// that only the node can write to.
func hasPlainMounts(spec *specs.Spec) (proc bool) {
	for _, m := range spec.Mounts {
		flags, known := flagsOf(m)
		if m.Type != "proc" && flags&unix.MS_BIND == 0 || !known || len(m.UIDMappings)+len(m.GIDMappings) > 0 {
			return false
		}
		proc = proc || m.Type == "proc" && m.Destination == "/proc"
	}
	return proc && spec.Root.Readonly
}

// hasPlainCgroups reports whether a pause's cgroups are asked for nothing that only
// libcontainer translates.
func hasPlainCgroups(spec *specs.Spec) bool {
	for name := range spec.Annotations {
		if strings.HasPrefix(name, "org.systemd.property.") {
			return false
		}
	}
	if spec.Linux.Resources == nil {
		return true
	}
	rest := *spec.Linux.Resources
	if cpu := rest.CPU; cpu != nil && *cpu == (specs.LinuxCPU{Shares: cpu.Shares}) {
		rest.CPU = nil
	}
	if memory := rest.Memory; memory != nil && *memory == (specs.LinuxMemory{Limit: memory.Limit}) {
		rest.Memory = nil
	}
	rest.Pids = nil
	return reflect.DeepEqual(rest, specs.LinuxResources{})
}

// asksAnother reports whether another process decides on calls, which needs a descriptor
// of the filter.
func asksAnother(profile *specs.LinuxSeccomp) bool {
	return profile != nil && (profile.DefaultAction == specs.ActNotify || profile.ListenerPath != "" ||
		slices.ContainsFunc(profile.Syscalls, func(call specs.LinuxSyscall) bool { return call.Action == specs.ActNotify }))
}
