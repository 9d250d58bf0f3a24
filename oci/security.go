package oci

import (
	"cmp"
	"fmt"
	"slices"
	"strings"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/state"
)

// parseProfile reads the older form: runtime/default, docker/default, unconfined, localhost/PATH or /NAME. Another
// text is taken for a PATH or NAME, and package validate refuses it if it is none.
func parseProfile(text string) *runtimeapi.SecurityProfile {
	profile := &runtimeapi.SecurityProfile{}
	switch text {
	case "":
		return nil
	case "runtime/default", "docker/default":
	case "unconfined":
		profile.ProfileType = runtimeapi.SecurityProfile_Unconfined
	default:
		profile.ProfileType = runtimeapi.SecurityProfile_Localhost
		profile.LocalhostRef = strings.TrimPrefix(text, "localhost/")
	}
	return profile
}

// DefaultCapabilities are those of a container that asks for none, as in Docker and containerd.
func DefaultCapabilities() []string {
	return []string{
		"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
		"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
	}
}

// AllCapabilities stands for all capabilities in a list.
const AllCapabilities = "ALL"

// containerCapabilities adds to a base and drops from it; dropping all beats adding all. All means all that
// the daemon has, since it cannot give others. Only ambient capabilities, which need it, are inheritable:
// files could give others to users that are not root (CVE-2022-24769).
func containerCapabilities(c *Container, spec *specs.Spec) error {
	all := func(names []string) bool { return slices.Contains(names, AllCapabilities) }
	asked, own := c.security().GetCapabilities(), c.Machine.Capabilities
	ambient, drop := RequestedCapabilities(asked.GetAddAmbientCapabilities()), RequestedCapabilities(asked.GetDropCapabilities())
	add := slices.Concat(RequestedCapabilities(asked.GetAddCapabilities()), ambient)
	set := c.Defaults.Capabilities
	if set == nil {
		set = DefaultCapabilities()
	}
	switch {
	case c.security().GetPrivileged():
		set, add, drop, ambient = own, nil, nil, nil
	case all(drop):
		set = nil
	case all(add) || all(set):
		set = own
	}
	set = slices.Compact(slices.Sorted(slices.Values(slices.Concat(set, add))))
	set = slices.DeleteFunc(set, func(name string) bool { return slices.Contains(drop, name) || !slices.Contains(own, name) })
	raised := slices.DeleteFunc(slices.Clone(set), func(name string) bool { return !slices.Contains(ambient, name) && !all(ambient) })
	spec.Process.Capabilities = &specs.LinuxCapabilities{Bounding: set, Effective: set, Permitted: set, Ambient: raised, Inheritable: raised}
	return nil
}

// CapabilityNames returns the names of a configuration for runtime-spec. They may omit CAP_, and have any case.
func CapabilityNames(names []string) (full []string) {
	for _, name := range names {
		name = strings.ToUpper(name)
		if name != AllCapabilities && !strings.HasPrefix(name, "CAP_") {
			name = "CAP_" + name
		}
		full = append(full, name)
	}
	return full
}

// RequestedCapabilities returns the names of a CRI request for runtime-spec. The CRI's names have no prefix: CAP_KILL
// becomes CAP_CAP_KILL, which no kernel has, and containerd and minicri ignore unknown names.
func RequestedCapabilities(names []string) (full []string) {
	for _, name := range names {
		if name = strings.ToUpper(name); name != AllCapabilities {
			name = "CAP_" + name
		}
		full = append(full, name)
	}
	return full
}

type asksForSeccomp interface {
	GetSeccomp() *runtimeapi.SecurityProfile
	GetSeccompProfilePath() string
}

// SeccompOf returns the profile, in the older form only without the newer (CRI, seccomp_profile_path).
func SeccompOf(security asksForSeccomp) *runtimeapi.SecurityProfile {
	if profile := security.GetSeccomp(); profile != nil {
		return profile
	}
	return parseProfile(security.GetSeccompProfilePath())
}

// setSeccomp sets the filter of a profile; byDefault makes that of RuntimeDefault.
func setSeccomp(profile *runtimeapi.SecurityProfile, spec *specs.Spec, byDefault func(*specs.Spec) (*specs.LinuxSeccomp, error)) (err error) {
	switch {
	case profile == nil || profile.GetProfileType() == runtimeapi.SecurityProfile_Unconfined:
	case profile.GetProfileType() == runtimeapi.SecurityProfile_Localhost:
		var body []byte
		if body, err = state.ReadFile(profile.GetLocalhostRef()); err == nil {
			spec.Linux.Seccomp, err = seccomp.LoadProfile(string(body), spec)
		}
	default:
		spec.Linux.Seccomp, err = byDefault(spec)
	}
	if err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	return nil
}

// pauseDefault allows what pause calls, and what the runtime's init (a Go program) may call after it has
// loaded the filter. The common profile takes 15 ms to compile.
func pauseDefault() *specs.LinuxSeccomp {
	return &specs.LinuxSeccomp{
		DefaultAction:   specs.ActErrno,
		DefaultErrnoRet: new(uint(unix.EPERM)),
		Syscalls: []specs.LinuxSyscall{{Action: specs.ActAllow, Names: []string{
			// pause
			"rt_sigprocmask", "rt_sigtimedwait", "wait4", "exit",
			// the exec barrier and the exec
			"close", "dup3", "execve", "execveat", "fcntl", "fstat", "fstatfs", "getdents64", "getpid", "getppid", "gettid", "lseek",
			"newfstatat", "openat", "openat2", "ppoll", "pread64", "read", "readlinkat", "seccomp", "statfs", "statx", "write",
			// the Go runtime
			"brk", "clock_gettime", "clone", "clone3", "epoll_create1", "epoll_ctl", "epoll_pwait", "eventfd2", "exit_group",
			"futex", "getrandom", "madvise", "mmap", "mprotect", "munmap", "nanosleep", "prctl", "restart_syscall", "rseq",
			"rt_sigaction", "rt_sigreturn", "sched_getaffinity", "sched_yield", "set_robust_list", "sigaltstack", "tgkill",
			"timer_create", "timer_delete", "timer_settime", "arch_prctl",
		}}},
	}
}

// containerProfiles needs the capabilities, on which the default seccomp profile depends.
func containerProfiles(c *Container, spec *specs.Spec) error {
	if c.security().GetPrivileged() {
		return nil
	}
	filter, profile := c.Defaults.Profiles()
	filter, profile = cmp.Or(SeccompOf(c.security()), filter), cmp.Or(ContainerAppArmor(c.security()), profile)
	spec.Process.ApparmorProfile = appArmorProfile(profile, c.Machine)
	return setSeccomp(filter, spec, seccomp.GetDefaultProfile)
}

// Profiles returns those of a container that asks for none.
func (d *Defaults) Profiles() (filter, appArmor *runtimeapi.SecurityProfile) {
	return parseProfile(d.Seccomp), parseProfile(cmp.Or(d.AppArmor, "runtime/default"))
}

// ContainerAppArmor returns the profile, in the older form only without the newer.
func ContainerAppArmor(security *runtimeapi.LinuxContainerSecurityContext) *runtimeapi.SecurityProfile {
	if profile := security.GetApparmor(); profile != nil {
		return profile
	}
	//lint:ignore SA1019 the older form is still sent
	return parseProfile(security.GetApparmorProfile())
}

// appArmorProfile returns no profile without AppArmor; package validate has refused one by name there.
func appArmorProfile(profile *runtimeapi.SecurityProfile, m machine.Machine) string {
	if profile == nil || !m.AppArmor {
		return ""
	}
	switch profile.GetProfileType() {
	case runtimeapi.SecurityProfile_Localhost:
		return strings.TrimPrefix(profile.GetLocalhostRef(), "localhost/")
	case runtimeapi.SecurityProfile_Unconfined:
		return "unconfined"
	default:
		return machine.DefaultProfile
	}
}

const privilegedType = "spc_t" // confined no more than the node's processes; not the daemon's domain

// SELinux are the labels of a process and its files, "" without SELinux.
type SELinux struct{ Process, Mount string }

// Level keeps the pod apart from others: s0:c1,c2.
func (s SELinux) Level() string {
	// user:role:type:level; a level has colons, too.
	parts := strings.SplitN(s.Process, ":", 4)
	if len(parts) < 4 {
		return ""
	}
	return parts[3]
}

// Shared reports whether the process has access to files of all pods, or its level has no categories.
func (s SELinux) Shared() bool {
	return !strings.Contains(s.Level(), ":") || strings.Contains(s.Process, ":"+privilegedType+":")
}

// SandboxSELinux returns the options for the label of a pod's pause process.
func SandboxSELinux(config *runtimeapi.PodSandboxConfig) []string {
	security := config.GetLinux().GetSecurityContext()
	return selinuxOptions(security.GetSelinuxOptions(), security.GetPrivileged(), "")
}

// ContainerSELinux returns the options for a container's label. It has its pod's level by default, so that
// the pod's containers share files that others cannot read.
func ContainerSELinux(config *runtimeapi.ContainerConfig, pod SELinux) []string {
	security := config.GetLinux().GetSecurityContext()
	return selinuxOptions(security.GetSelinuxOptions(), security.GetPrivileged(), pod.Level())
}

func selinuxOptions(o *runtimeapi.SELinuxOption, privileged bool, level string) (options []string) {
	kind := o.GetType()
	if kind == "" && privileged {
		kind = privilegedType
	}
	for _, part := range [][2]string{{"user", o.GetUser()}, {"role", o.GetRole()}, {"type", kind}, {"level", cmp.Or(o.GetLevel(), level)}} {
		if part[1] != "" {
			options = append(options, part[0]+":"+part[1])
		}
	}
	return options
}
