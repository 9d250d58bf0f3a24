package oci

import (
	"fmt"

	"github.com/moby/profiles/seccomp"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/state"
)

func sandboxSeccomp(s *Sandbox, spec *specs.Spec) error {
	if s.security().GetPrivileged() {
		return nil
	}
	return setSeccomp(s.security(), spec, func(*specs.Spec) (*specs.LinuxSeccomp, error) { return pauseDefault(), nil })
}

// containerSeccomp: the default profile allows the system calls that belong to
// the capabilities of the container, which are set before.
func containerSeccomp(c *Container, spec *specs.Spec) error {
	if c.security().GetPrivileged() {
		return nil
	}
	return setSeccomp(c.security(), spec, seccomp.GetDefaultProfile)
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
func setSeccomp(security asksForSeccomp, spec *specs.Spec, byDefault func(*specs.Spec) (*specs.LinuxSeccomp, error)) (err error) {
	profile := SeccompOf(security)
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
