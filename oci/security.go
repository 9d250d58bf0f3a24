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

// parseProfile reads the older form of a security profile: runtime/default,
// docker/default, unconfined, or localhost/ and a path or a name.
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

// containerCapabilities: "all" means all that the daemon has, others could not
// be given. The inheritable set holds the ambient capabilities alone, which
// need it: what else is in it, a file's inheritable capabilities would give to
// users that are not root (CVE-2022-24769).
func containerCapabilities(c *Container, spec *specs.Spec) error {
	spec.Process.Capabilities = &specs.LinuxCapabilities{}
	if c.security().GetPrivileged() {
		setCapabilities(spec, c.Machine.Capabilities)
		return nil
	}
	asked := c.security().GetCapabilities()
	ambient, drop := CapabilityNames(asked.GetAddAmbientCapabilities()), CapabilityNames(asked.GetDropCapabilities())
	add := slices.Concat(CapabilityNames(asked.GetAddCapabilities()), ambient)
	set := c.baseCapabilities(add, drop)
	if slices.Contains(set, AllCapabilities) {
		set = slices.Clone(c.Machine.Capabilities)
	}
	set = slices.DeleteFunc(append(set, add...), func(name string) bool {
		return slices.Contains(drop, name) || !slices.Contains(c.Machine.Capabilities, name)
	})
	setCapabilities(spec, set)
	spec.Process.Capabilities.Ambient = onlyIn(spec.Process.Capabilities.Bounding, ambient)
	spec.Process.Capabilities.Inheritable = spec.Process.Capabilities.Ambient
	return nil
}

// baseCapabilities is what single capabilities are added to and dropped from:
// dropping all is stronger than adding all.
func (c *Container) baseCapabilities(add, drop []string) []string {
	switch {
	case slices.Contains(drop, AllCapabilities):
		return nil
	case slices.Contains(add, AllCapabilities):
		return []string{AllCapabilities}
	case c.Defaults.Capabilities != nil:
		return slices.Clone(c.Defaults.Capabilities)
	default:
		return DefaultCapabilities()
	}
}

// onlyIn is the set of the wanted capabilities, "all" resolved, that are there.
func onlyIn(there, wanted []string) []string {
	return slices.DeleteFunc(slices.Clone(there), func(name string) bool {
		return !slices.Contains(wanted, name) && !slices.Contains(wanted, AllCapabilities)
	})
}

func setCapabilities(spec *specs.Spec, names []string) {
	sorted := slices.Compact(slices.Sorted(slices.Values(names)))
	spec.Process.Capabilities.Bounding = sorted
	spec.Process.Capabilities.Effective = sorted
	spec.Process.Capabilities.Permitted = sorted
}

// CapabilityNames are the names as runtime-spec has them: Kubernetes writes
// them without CAP_, and neither cares for the case of letters.
func CapabilityNames(names []string) []string {
	var full []string
	for _, name := range names {
		full = append(full, capabilityName(name))
	}
	return full
}

func capabilityName(name string) string {
	name = strings.ToUpper(name)
	if name == AllCapabilities || strings.HasPrefix(name, "CAP_") {
		return name
	}
	return "CAP_" + name
}

func sandboxSeccomp(s *Sandbox, spec *specs.Spec) error {
	if s.security().GetPrivileged() {
		return nil
	}
	return setSeccomp(SeccompOf(s.security()), spec, func(*specs.Spec) (*specs.LinuxSeccomp, error) { return pauseDefault(), nil })
}

// containerSeccomp: the default profile allows the system calls that belong to
// the capabilities of the container, which are set before.
func containerSeccomp(c *Container, spec *specs.Spec) error {
	if c.security().GetPrivileged() {
		return nil
	}
	profile := SeccompOf(c.security())
	if profile == nil {
		profile = parseProfile(c.Defaults.Seccomp)
	}
	return setSeccomp(profile, spec, seccomp.GetDefaultProfile)
}

// asksForSeccomp is the security context of a pod or of a container.
type asksForSeccomp interface {
	GetSeccomp() *runtimeapi.SecurityProfile
	GetSeccompProfilePath() string
}

// SeccompOf is the profile that a pod or a container asks for. The older form as a
// string counts only where the newer one is missing (CRI, seccomp_profile_path).
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
		spec.Linux.Seccomp, err = loadSeccomp(profile.GetLocalhostRef(), spec)
	default:
		spec.Linux.Seccomp, err = byDefault(spec)
	}
	if err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	return nil
}

func loadSeccomp(path string, spec *specs.Spec) (*specs.LinuxSeccomp, error) {
	body, err := state.ReadFile(path)
	if err != nil {
		return nil, err
	}
	return seccomp.LoadProfile(string(body), spec)
}

// pauseDefault is the runtime's default profile for pause. It is far narrower
// than the one for applications, because the program is known: what pause
// itself calls, and what the runtime's init (a Go program) may call between
// loading the filter and becoming pause. It also loads in a fraction of the
// time: the rules of the common profile take 15 ms to compile.
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

func sandboxAppArmor(s *Sandbox, spec *specs.Spec) error {
	if s.security().GetPrivileged() {
		return nil
	}
	spec.Process.ApparmorProfile = appArmorProfile(s.security().GetApparmor(), s.Machine)
	return nil
}

// containerAppArmor: a container that names no profile gets the default one.
func containerAppArmor(c *Container, spec *specs.Spec) error {
	if c.security().GetPrivileged() {
		return nil
	}
	profile := ContainerAppArmor(c.security())
	if profile == nil {
		profile = parseProfile(cmp.Or(c.Defaults.AppArmor, "runtime/default"))
	}
	spec.Process.ApparmorProfile = appArmorProfile(profile, c.Machine)
	return nil
}

// ContainerAppArmor is the profile that a container asks for; the older form
// counts only where the newer one is missing (CRI, apparmor_profile).
func ContainerAppArmor(security *runtimeapi.LinuxContainerSecurityContext) *runtimeapi.SecurityProfile {
	if profile := security.GetApparmor(); profile != nil {
		return profile
	}
	//lint:ignore SA1019 the older form is still sent
	return parseProfile(security.GetApparmorProfile())
}

// appArmorProfile: the default degrades to none where the machine has no
// AppArmor; a profile asked for by name was refused there before.
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

// privilegedType is the type of privileged containers: SELinux confines them no
// more than processes of the node, and does so by its policy, not by leaving
// them in the domain of the daemon.
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

// Shared reports whether files that get the label are for several pods: the
// level has no categories, or the process has access to those of all pods.
func (s SELinux) Shared() bool {
	return !strings.Contains(s.Level(), ":") || strings.Contains(s.Process, ":"+privilegedType+":")
}

// SandboxSELinux are the options of the label of a pod's pause process.
func SandboxSELinux(config *runtimeapi.PodSandboxConfig) []string {
	security := config.GetLinux().GetSecurityContext()
	return selinuxOptions(security.GetSelinuxOptions(), security.GetPrivileged(), "")
}

// ContainerSELinux are the options of the label of a container: with the level
// of its pod, unless it asks for one. So the containers of a pod can share
// files, and those of other pods cannot read them.
func ContainerSELinux(config *runtimeapi.ContainerConfig, pod SELinux) []string {
	security := config.GetLinux().GetSecurityContext()
	return selinuxOptions(security.GetSelinuxOptions(), security.GetPrivileged(), pod.Level())
}

func selinuxOptions(o *runtimeapi.SELinuxOption, privileged bool, level string) []string {
	if o.GetLevel() != "" {
		level = o.GetLevel()
	}
	kind := o.GetType()
	if kind == "" && privileged {
		kind = privilegedType
	}
	var options []string
	add := func(name, value string) {
		if value != "" {
			options = append(options, name+":"+value)
		}
	}
	add("user", o.GetUser())
	add("role", o.GetRole())
	add("type", kind)
	add("level", level)
	return options
}

func sandboxSELinux(s *Sandbox, spec *specs.Spec) error {
	spec.Process.SelinuxLabel, spec.Linux.MountLabel = s.SELinux.Process, s.SELinux.Mount
	return nil
}

func containerSELinux(c *Container, spec *specs.Spec) error {
	spec.Process.SelinuxLabel, spec.Linux.MountLabel = c.SELinux.Process, c.SELinux.Mount
	return nil
}
