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

// parseProfile reads the older form: runtime/default, docker/default, unconfined, or localhost/
// and a path or a name.
func parseProfile(text string) *runtimeapi.SecurityProfile {
	profile := &runtimeapi.SecurityProfile{}
	ref, isLocal := strings.CutPrefix(text, "localhost/")
	switch {
	case text == "":
		return nil
	case isLocal:
		profile.ProfileType = runtimeapi.SecurityProfile_Localhost
		profile.LocalhostRef = ref
	case text == "unconfined":
		profile.ProfileType = runtimeapi.SecurityProfile_Unconfined
	default:
		profile.ProfileType = runtimeapi.SecurityProfile_RuntimeDefault
	}
	return profile
}

// DefaultCapabilities are those of a container that asks for none, the same as
// in Docker and containerd.
func DefaultCapabilities() []string {
	return []string{
		"CAP_AUDIT_WRITE", "CAP_CHOWN", "CAP_DAC_OVERRIDE", "CAP_FOWNER", "CAP_FSETID", "CAP_KILL", "CAP_MKNOD",
		"CAP_NET_BIND_SERVICE", "CAP_NET_RAW", "CAP_SETFCAP", "CAP_SETGID", "CAP_SETPCAP", "CAP_SETUID", "CAP_SYS_CHROOT",
	}
}

// AllCapabilities stands for all that there are, in a list of capabilities.
const AllCapabilities = "ALL"

// containerCapabilities: single capabilities are added to and dropped from a base, and
// dropping all is stronger than adding all. "All" means all that the daemon has, others
// could not be given. The inheritable set holds the ambient capabilities alone, which
// need it: what else is in it, a file's inheritable capabilities would give to
// users that are not root (CVE-2022-24769).
func containerCapabilities(c *Container, spec *specs.Spec) error {
	all := func(names []string) bool { return slices.Contains(names, AllCapabilities) }
	asked, own := c.security().GetCapabilities(), c.Machine.Capabilities
	ambient, drop := CapabilityNames(asked.GetAddAmbientCapabilities()), CapabilityNames(asked.GetDropCapabilities())
	add := slices.Concat(CapabilityNames(asked.GetAddCapabilities()), ambient)
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

// CapabilityNames are the names as runtime-spec has them: Kubernetes writes
// them without CAP_, and neither cares for the case of letters.
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

// asksForSeccomp is the security context of a pod or of a container.
type asksForSeccomp interface {
	GetSeccomp() *runtimeapi.SecurityProfile
	GetSeccompProfilePath() string
}

// SeccompOf is the profile asked for. The older form counts only where the newer one is missing
// (CRI, seccomp_profile_path).
func SeccompOf(security asksForSeccomp) *runtimeapi.SecurityProfile {
	if profile := security.GetSeccomp(); profile != nil {
		return profile
	}
	return parseProfile(security.GetSeccompProfilePath())
}

// setSeccomp sets the filter of the profile that is asked for; byDefault makes that
// of RuntimeDefault.
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

// pauseDefault is the default profile for pause: what it calls, and what the runtime's init (a
// Go program) may call between loading the filter and becoming pause. It is narrower than the
// common one, whose rules take 15 ms to compile.
func pauseDefault() *specs.LinuxSeccomp {
	eperm := uint(unix.EPERM)
	return &specs.LinuxSeccomp{
		DefaultAction:   specs.ActErrno,
		DefaultErrnoRet: &eperm,
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

// containerProfiles: without a profile a container gets that of the configuration. The default
// seccomp profile allows what belongs to its capabilities, which are set before.
func containerProfiles(c *Container, spec *specs.Spec) error {
	if c.security().GetPrivileged() {
		return nil
	}
	filter, profile := SeccompOf(c.security()), ContainerAppArmor(c.security())
	if filter == nil {
		filter = parseProfile(c.Defaults.Seccomp)
	}
	if profile == nil {
		profile = parseProfile(cmp.Or(c.Defaults.AppArmor, "runtime/default"))
	}
	spec.Process.ApparmorProfile = appArmorProfile(profile, c.Machine)
	return setSeccomp(filter, spec, seccomp.GetDefaultProfile)
}

// ContainerAppArmor is the profile asked for; the older form counts only where the newer one is
// missing.
func ContainerAppArmor(security *runtimeapi.LinuxContainerSecurityContext) *runtimeapi.SecurityProfile {
	if profile := security.GetApparmor(); profile != nil {
		return profile
	}
	//lint:ignore SA1019 the older form is still sent
	return parseProfile(security.GetApparmorProfile())
}

// appArmorProfile: the default degrades to none without AppArmor; a profile asked for by name
// was refused before.
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

// privilegedType confines no more than the node's processes are, by the policy, not in the
// daemon's domain.
const privilegedType = "spc_t"

// SELinux are the labels of a process and of its files, "" where the machine has
// no SELinux.
type SELinux struct{ Process, Mount string }

// Level is what keeps the pod apart from others, as in s0:c1,c2.
func (s SELinux) Level() string {
	// user:role:type:level; a level has colons, too.
	parts := strings.SplitN(s.Process, ":", 4)
	if len(parts) < 4 {
		return ""
	}
	return parts[3]
}

// Shared reports whether files with the label are for several pods: the level has no categories,
// or the process has access to those of all pods.
func (s SELinux) Shared() bool {
	return !strings.Contains(s.Level(), ":") || strings.Contains(s.Process, ":"+privilegedType+":")
}

// SandboxSELinux are the options of the label of a pod's pause process.
func SandboxSELinux(config *runtimeapi.PodSandboxConfig) []string {
	security := config.GetLinux().GetSecurityContext()
	return selinuxOptions(security.GetSelinuxOptions(), security.GetPrivileged(), "")
}

// ContainerSELinux are the options of the label of a container: with its pod's level unless it
// asks for one, so that the pod's containers share files and others cannot read them.
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
