package oci

import (
	"fmt"
	"os"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func sandboxSeccomp(s *Sandbox, spec *specs.Spec) error {
	if s.security().GetPrivileged() {
		return nil
	}
	profile, err := pauseSeccomp(SeccompOf(s.security()))
	if err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	spec.Linux.Seccomp = profile
	return nil
}

// SeccompOf is the profile that a sandbox asks for. The older form as a string
// counts only where the newer one is missing (CRI, seccomp_profile_path).
func SeccompOf(security *runtimeapi.LinuxSandboxSecurityContext) *runtimeapi.SecurityProfile {
	if profile := security.GetSeccomp(); profile != nil {
		return profile
	}
	//lint:ignore SA1019 the older form is still sent
	return parseProfile(security.GetSeccompProfilePath())
}

func pauseSeccomp(profile *runtimeapi.SecurityProfile) (*specs.LinuxSeccomp, error) {
	switch {
	case profile == nil || profile.GetProfileType() == runtimeapi.SecurityProfile_Unconfined:
		return nil, nil
	case profile.GetProfileType() == runtimeapi.SecurityProfile_Localhost:
		body, err := os.ReadFile(profile.GetLocalhostRef())
		if err != nil {
			return nil, err
		}
		return seccomp.LoadProfile(string(body), &specs.Spec{Process: &specs.Process{Capabilities: &specs.LinuxCapabilities{}}})
	default:
		return pauseDefault(), nil
	}
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

// containerSeccomp: the default profile allows the system calls that belong to
// the capabilities of the container, which are set before.
func containerSeccomp(c *Container, spec *specs.Spec) error {
	if c.security().GetPrivileged() {
		return nil
	}
	profile, err := applicationSeccomp(ContainerSeccomp(c.security()), spec)
	if err != nil {
		return fmt.Errorf("seccomp: %w", err)
	}
	spec.Linux.Seccomp = profile
	return nil
}

// ContainerSeccomp is the profile that a container asks for (see SeccompOf).
func ContainerSeccomp(security *runtimeapi.LinuxContainerSecurityContext) *runtimeapi.SecurityProfile {
	if profile := security.GetSeccomp(); profile != nil {
		return profile
	}
	//lint:ignore SA1019 the older form is still sent
	return parseProfile(security.GetSeccompProfilePath())
}

func applicationSeccomp(profile *runtimeapi.SecurityProfile, spec *specs.Spec) (*specs.LinuxSeccomp, error) {
	switch {
	case profile == nil || profile.GetProfileType() == runtimeapi.SecurityProfile_Unconfined:
		return nil, nil
	case profile.GetProfileType() == runtimeapi.SecurityProfile_Localhost:
		body, err := os.ReadFile(profile.GetLocalhostRef())
		if err != nil {
			return nil, err
		}
		return seccomp.LoadProfile(string(body), spec)
	default:
		return seccomp.GetDefaultProfile(spec)
	}
}
