package e2e

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"runtime"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

func security(change func(*runtimeapi.LinuxSandboxSecurityContext)) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) { change(c.Linux.SecurityContext) }
}

// cri: LinuxSandboxSecurityContext.run_as_group LinuxSandboxSecurityContext.supplemental_groups
// cri: Int64Value.value LinuxSandboxSecurityContext.run_as_user
func TestRunAs(t *testing.T) {
	n := newNode(t)
	user := security(func(s *runtimeapi.LinuxSandboxSecurityContext) {
		s.RunAsUser = &runtimeapi.Int64Value{Value: 1234}
		s.RunAsGroup = &runtimeapi.Int64Value{Value: 2345}
		s.SupplementalGroups = []int64{3456, 4567}
	})
	pid := pausePID(t, n, n.RunPod(n.PodConfig("web", user)))
	for field, want := range map[string]string{
		"Uid": "1234 1234 1234 1234", "Gid": "2345 2345 2345 2345", "Groups": "3456 4567",
	} {
		if got := statusField(t, pid, field); got != want {
			t.Errorf("%s: want %s, got %s", field, want, got)
		}
	}
	pid = pausePID(t, n, n.RunPod(n.PodConfig("mapped", userNamespace(idMap(0, 100000, 65536)), user)))
	if got := statusField(t, pid, "Uid"); got != "101234 101234 101234 101234" {
		t.Errorf("in a user namespace it is %s on the node", got)
	}
}

// Pause can do nothing, whatever is asked for; its root is the same for all pods. It has
// three descriptors, all of a pipe that nobody else has. For its oom_score_adj the wish is
// -998; without CAP_SYS_RESOURCE the nearest is the daemon's own.
//
// cri: LinuxSandboxSecurityContext.readonly_rootfs
func TestPauseIsConfined(t *testing.T) {
	n := newNode(t)
	pid := pausePID(t, n, n.RunPod(n.PodConfig("web", security(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.ReadonlyRootfs = false }))))
	for field, want := range map[string]string{
		"NoNewPrivs": "1", "CapInh": "0000000000000000", "CapPrm": "0000000000000000",
		"CapEff": "0000000000000000", "CapBnd": "0000000000000000", "CapAmb": "0000000000000000",
	} {
		if got := statusField(t, pid, field); got != want {
			t.Errorf("%s: want %s, got %s", field, want, got)
		}
	}
	inside(t, pid, map[string]int{"mnt": unix.CLONE_NEWNS}, func() error {
		err := os.WriteFile("/written", nil, 0o600)
		if !errors.Is(err, unix.EROFS) {
			return fmt.Errorf("want EROFS, got %w", err)
		}
		return nil
	})
	adjust := "-998"
	capabilities, err := strconv.ParseUint(statusField(t, os.Getpid(), "CapEff"), 16, 64)
	check(t, err)
	if capabilities&(1<<unix.CAP_SYS_RESOURCE) == 0 {
		adjust = procFile(t, n.PID(), "oom_score_adj")
	}
	if got := procFile(t, pid, "oom_score_adj"); got != adjust {
		t.Errorf("oom_score_adj: want %s, got %s", adjust, got)
	}
	entries, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
	check(t, err)
	for _, entry := range entries {
		target, _ := os.Readlink(fmt.Sprintf("/proc/%d/fd/%s", pid, entry.Name()))
		if entry.Name() > "2" || !strings.HasPrefix(target, "pipe:") {
			t.Errorf("descriptor %s is %s", entry.Name(), target)
		}
	}
}

// Seccomp of /proc/PID/status: 0 is off, 2 is a filter (proc_pid_status(5)).
//
// cri: LinuxSandboxSecurityContext.seccomp LinuxSandboxSecurityContext.seccomp_profile_path
func TestSeccomp(t *testing.T) {
	n := newNode(t)
	local := filepath.Join(n.Dir, "profile.json")
	check(t, os.WriteFile(local, []byte(`{"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir"], "action": "SCMP_ACT_ERRNO"}]}`), 0o600))
	profile := func(kind runtimeapi.SecurityProfile_ProfileType, ref string) harness.PodOption {
		return security(func(s *runtimeapi.LinuxSandboxSecurityContext) {
			s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: kind, LocalhostRef: ref}
		})
	}
	old := func(path string) harness.PodOption {
		//lint:ignore SA1019 the deprecated form is what is tested
		return security(func(s *runtimeapi.LinuxSandboxSecurityContext) { s.SeccompProfilePath = path })
	}
	for name, c := range map[string]struct {
		option harness.PodOption
		want   string
	}{
		"runtime-default":     {profile(runtimeapi.SecurityProfile_RuntimeDefault, ""), "2"},
		"localhost":           {profile(runtimeapi.SecurityProfile_Localhost, local), "2"},
		"unconfined":          {profile(runtimeapi.SecurityProfile_Unconfined, ""), "0"},
		"old-runtime-default": {old("runtime/default"), "2"},
		"old-localhost":       {old("localhost/" + local), "2"},
		"old-unconfined":      {old("unconfined"), "0"},
	} {
		pid := pausePID(t, n, n.RunPod(n.PodConfig(name, c.option)))
		if got := statusField(t, pid, "Seccomp"); got != c.want {
			t.Errorf("%s: want %s, got %s", name, c.want, got)
		}
	}
	fifo := filepath.Join(n.Dir, "fifo.json") // is not waited for
	check(t, unix.Mkfifo(fifo, 0o600))
	for _, ref := range []string{"", "relative.json", filepath.Join(n.Dir, "absent.json"), n.Dir, fifo} {
		_, err := run(t, n, n.PodConfig("refused", profile(runtimeapi.SecurityProfile_Localhost, ref)))
		wantCode(t, err, codes.InvalidArgument)
	}
}

// cri: LinuxSandboxSecurityContext.apparmor SecurityProfile.localhost_ref SecurityProfile.profile_type
func TestAppArmorByNameNeedsAppArmor(t *testing.T) {
	if _, err := os.Stat("/sys/kernel/security/apparmor/profiles"); !errors.Is(err, fs.ErrNotExist) {
		t.Log("this machine has AppArmor: an absent profile is refused all the same")
	}
	n := newNode(t)
	profile := func(kind runtimeapi.SecurityProfile_ProfileType, ref string) harness.PodOption {
		return security(func(s *runtimeapi.LinuxSandboxSecurityContext) {
			s.Apparmor = &runtimeapi.SecurityProfile{ProfileType: kind, LocalhostRef: ref}
		})
	}
	n.RunPod(n.PodConfig("default", profile(runtimeapi.SecurityProfile_RuntimeDefault, "")))
	_, err := run(t, n, n.PodConfig("absent", profile(runtimeapi.SecurityProfile_Localhost, "no-such-profile")))
	wantCode(t, err, codes.InvalidArgument)
}

// A process of the pod that has the same user, and sees pause in a pid namespace that
// they share, gets at nothing that pause has open.
func TestPauseGivesNoDescriptorAway(t *testing.T) {
	n := newNode(t)
	for _, user := range []int{0, 1234} {
		pid := pausePID(t, n, n.RunPod(n.PodConfig(fmt.Sprintf("user%d", user), security(func(s *runtimeapi.LinuxSandboxSecurityContext) {
			s.RunAsUser = &runtimeapi.Int64Value{Value: int64(user)}
			s.RunAsGroup = &runtimeapi.Int64Value{Value: int64(user)}
		}))))
		if err := takeDescriptor(pid); err != nil {
			t.Errorf("root, as the supervisor is: %v", err)
		}
		taken := make(chan error, 1)
		go func() {
			runtime.LockOSThread() // and never unlocked: it ends with the thread
			taken <- errors.Join(becomeUser(user), takeDescriptor(pid))
		}()
		err := <-taken
		if !errors.Is(err, unix.EPERM) || !strings.Contains(fmt.Sprint(err), "pidfd_getfd") {
			t.Errorf("user %d gets a descriptor of pause: %v", user, err)
		}
	}
}

// becomeUser makes this thread one of a user without capabilities.
func becomeUser(user int) error {
	for _, call := range []uintptr{unix.SYS_SETRESGID, unix.SYS_SETRESUID} { // of the thread, not of the process
		if _, _, errno := unix.RawSyscall(call, uintptr(user), uintptr(user), uintptr(user)); errno != 0 {
			return os.NewSyscallError("setresid", errno)
		}
	}
	header, none := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
	return os.NewSyscallError("capset", unix.Capset(&header, &none[0]))
}

func takeDescriptor(pid int) error {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return os.NewSyscallError("pidfd_open", err)
	}
	defer unix.Close(pidfd)
	fd, err := unix.PidfdGetfd(pidfd, 0, 0)
	if err != nil {
		return os.NewSyscallError("pidfd_getfd", err)
	}
	return unix.Close(fd)
}
