package launch_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/test/harness"
)

// profiles are of all kinds. What is compared allows what libcontainer's init does.
func profiles(t *testing.T, s *specs.Spec) map[string]*specs.LinuxSeccomp {
	enosys := uint(unix.ENOSYS)
	byArgument := allowing(initCalls...)
	byArgument.Architectures = []specs.Arch{specs.ArchX86_64}
	byArgument.Syscalls = append(byArgument.Syscalls,
		specs.LinuxSyscall{Names: []string{"personality", "no_such_call"}, Action: specs.ActAllow, Args: []specs.LinuxSeccompArg{{Index: 0, Value: 8, Op: specs.OpEqualTo}}},
		specs.LinuxSyscall{Names: []string{"clone"}, Action: specs.ActErrno, ErrnoRet: &enosys, Args: []specs.LinuxSeccompArg{
			{Index: 0, Value: 0x7e020000, ValueTwo: 0x10000000, Op: specs.OpMaskedEqual}, {Index: 1, Value: 1, Op: specs.OpNotEqual},
		}},
		specs.LinuxSyscall{Names: []string{"socket"}, Action: specs.ActAllow, Args: []specs.LinuxSeccompArg{
			{Index: 0, Value: 1, Op: specs.OpEqualTo}, {Index: 0, Value: 2, Op: specs.OpGreaterThan}, {Index: 0, Value: 9, Op: specs.OpLessEqual},
		}},
	)
	small := &specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{
		{Names: []string{"reboot"}, Action: specs.ActKillProcess},
		{Names: []string{"kexec_load"}, Action: specs.ActKill},
		{Names: []string{"acct"}, Action: specs.ActTrap},
		{Names: []string{"swapon"}, Action: specs.ActErrno},
		{Names: []string{"swapoff"}, Action: specs.ActTrace, ErrnoRet: new(uint(unix.EPERM))},
	}, Flags: []specs.LinuxSeccompFlag{specs.LinuxSeccompFlagLog}}
	return map[string]*specs.LinuxSeccomp{
		"arguments":              byArgument,
		"what is refused":        small,
		"the default profile":    defaultProfile(t, s),
		"x32 too":                {DefaultAction: specs.ActErrno, DefaultErrnoRet: &enosys, Architectures: []specs.Arch{specs.ArchX86_64, specs.ArchX32}, Syscalls: byArgument.Syscalls, Flags: []specs.LinuxSeccompFlag{}},
		"another machine's also": {DefaultAction: specs.ActKillThread, Architectures: []specs.Arch{specs.ArchX86}, Syscalls: byArgument.Syscalls},
	}
}

// The filter of a launch decides as that of libcontainer's init.
func TestFilterIsWhatInitLoads(t *testing.T) {
	n := newNode(t)
	for name, profile := range profiles(t, n.spec("any")) {
		t.Run(name, func(t *testing.T) {
			c := n.container(t, "filtered", func(s *specs.Spec) { s.Linux.Seccomp = profile })
			got, want := c.lookExec(t, execProcess())["seccomp"], c.lookInit(t, execProcess())["seccomp"]
			harness.Want(t, got == want, "launched:\n%s\nby init:\n%s", got, want)
		})
	}
}

// What cannot be compiled is an error, and what needs another process is libcontainer's.
func TestProfileThatCannotBeCompiled(t *testing.T) {
	_, c := execNode(t, noFilter)
	for name, profile := range map[string]*specs.LinuxSeccomp{
		"an unknown action":       {DefaultAction: "SCMP_ACT_DANCE"},
		"one of a call":           {DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{{Names: []string{"read"}, Action: "SCMP_ACT_DANCE"}}},
		"an unknown architecture": {DefaultAction: specs.ActErrno, Architectures: []specs.Arch{"SCMP_ARCH_PDP11"}},
		"one of another order":    {DefaultAction: specs.ActErrno, Architectures: []specs.Arch{specs.ArchS390X}},
		"an unknown flag":         {DefaultAction: specs.ActErrno, Flags: []specs.LinuxSeccompFlag{"FLAG"}},
		"an unknown operator": {DefaultAction: specs.ActErrno, Syscalls: []specs.LinuxSyscall{
			{Names: []string{"read"}, Action: specs.ActAllow, Args: []specs.LinuxSeccompArg{{Op: "SCMP_CMP_ODD"}}},
		}},
		"an argument that no call has": {DefaultAction: specs.ActErrno, Syscalls: []specs.LinuxSyscall{
			{Names: []string{"read"}, Action: specs.ActAllow, Args: []specs.LinuxSeccompArg{{Index: 6, Op: specs.OpEqualTo}}},
		}},
	} {
		spec := *c.spec
		spec.Linux = &specs.Linux{Namespaces: c.spec.Linux.Namespaces, Seccomp: profile}
		_, err := c.exec(t, t.Context(), execProcess(), func(e *launch.Exec) { e.Spec = &spec })
		harness.Want(t, strings.Contains(fmt.Sprint(err), "seccomp: "), "%s: %v", name, err)
	}
	c.spec.Linux.Seccomp = &specs.LinuxSeccomp{DefaultAction: specs.ActAllow, Syscalls: []specs.LinuxSyscall{{Names: []string{"mount"}, Action: specs.ActNotify}}}
	harness.Want(t, !launch.CanExec(c.spec, execProcess()), "a filter that asks another process is launched")
}

// The program of an exec is executed under its AppArmor profile, as by libcontainer's
// init, and one that is not loaded is an error.
func TestExecUnderAppArmor(t *testing.T) {
	if !strings.HasPrefix(read("/sys/module/apparmor/parameters/enabled"), "Y") {
		t.Skip("no AppArmor")
	}
	const profile = "minicri-launch-test"
	rules := "profile " + profile + " flags=(attach_disconnected) {\n file,\n signal,\n ptrace,\n unix,\n deny /etc/shadow r,\n}\n"
	out, status := command(t, "sh", "-c", "echo '"+rules+"' | apparmor_parser -r")
	harness.Want(t, status == 0, "%d: %s", status, out)
	defer command(t, "sh", "-c", "echo '"+rules+"' | apparmor_parser -R")
	for name, nnp := range map[string]bool{"no new privileges": true, "privileges that it may get": false} {
		t.Run(name, func(t *testing.T) {
			_, c := execNode(t, func(s *specs.Spec) { s.Linux.Seccomp = defaultProfile(t, s) })
			p := execProcess()
			p.ApparmorProfile, p.NoNewPrivileges = profile, nnp
			want, got := c.lookInit(t, p), c.lookExec(t, p)
			harness.Want(t, strings.HasPrefix(got["attr/current"], profile+" (enforce)"), "it is confined by %q", got["attr/current"])
			compare(t, got, want)
			p.ApparmorProfile = "not-there"
			if _, err := c.exec(t, t.Context(), p); !strings.Contains(fmt.Sprint(err), "set the AppArmor profile not-there: no such file or directory") {
				t.Errorf("a profile that is not loaded: %v", err)
			}
		})
	}
}
