package launch_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/test/harness"
)

// variants are what pods ask for of their pause.
var variants = map[string]func(*specs.Spec){
	"a plain pod": func(*specs.Spec) {},
	"its own host name and parameters": func(s *specs.Spec) {
		s.Hostname = "web-0"
		s.Linux.Sysctl = map[string]string{"kernel.shm_rmid_forced": "1", "kernel.msgmax": "4711"}
	},
	"a network namespace": func(s *specs.Spec) {
		ours := specs.LinuxNamespace{Type: specs.NetworkNamespace, Path: fmt.Sprintf("/proc/%d/ns/net", os.Getpid())}
		s.Linux.Namespaces = append(s.Linux.Namespaces, ours)
	},
	"the node's processes": func(s *specs.Spec) {
		s.Linux.Namespaces = slices.DeleteFunc(s.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return n.Type == specs.PIDNamespace })
	},
	"only mounts of its own": func(s *specs.Spec) { s.Linux.Namespaces = s.Linux.Namespaces[:1] },
	"a user and groups": func(s *specs.Spec) {
		s.Process.User = specs.User{UID: 1234, GID: 5678, AdditionalGids: []uint32{7, 8, 100000}}
	},
	"no filter":           func(s *specs.Spec) { s.Linux.Seccomp = nil },
	"flags of the filter": func(s *specs.Spec) { s.Linux.Seccomp.Flags = []specs.LinuxSeccompFlag{} },
}

// A pause that is launched cannot be told from one that libcontainer's init became.
func TestLaunchedIsWhatInitBecomes(t *testing.T) {
	n, number := newNode(t), 0
	for name, change := range variants {
		t.Run(name, func(t *testing.T) {
			number++
			want := n.lookInit(t, fmt.Sprintf("byinit%02d", number), change)
			got := n.lookPause(t, fmt.Sprintf("launched%02d", number), change)
			compare(t, got, want)
		})
	}
}

func compare(t *testing.T, got, want map[string]string) {
	for key := range want {
		harness.Want(t, got[key] == want[key], "%s:\n--- launched\n%s\n--- by init\n%s", key, got[key], want[key])
	}
	harness.Want(t, len(got) == len(want), "%d facts, want %d", len(got), len(want))
}

func (n *node) lookInit(t *testing.T, id string, change func(*specs.Spec)) map[string]string {
	return seenOf(t, n.container(t, id, change).pid, id)
}

// create makes a container by libcontainer, which ends with the test.
func (n *node) create(t *testing.T, id string, spec *specs.Spec) (pid int) {
	config, err := json.Marshal(spec)
	err = errors.Join(err, os.MkdirAll(n.bundle(id), 0o755), os.WriteFile(n.bundle(id)+"/config.json", config, 0o644))
	if err == nil {
		pid, err = n.ask(starter.Request{Verb: starter.Create, Container: starter.Container{ID: id}})
	}
	if err == nil {
		_, err = os.ReadFile(filepath.Join(n.dir, "states", id, launch.FIFOFile))
	}
	harness.Check(t, err)
	t.Cleanup(func() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		gone(t, pid)
		_, err := n.ask(starter.Request{Verb: starter.Delete, Container: starter.Container{ID: id}})
		harness.Check(t, err)
	})
	return pid
}

func (n *node) lookPause(t *testing.T, id string, change func(*specs.Spec)) map[string]string {
	spec := n.spec(id)
	change(spec)
	harness.Want(t, launch.CanPause(spec), "it is not launched")
	p, err := n.pause(t, t.Context(), id, spec)
	harness.Check(t, err)
	defer n.end(t, p)
	harness.Want(t, !strings.Contains(read(fmt.Sprintf("/proc/%d/cmdline", p.Child.PID)), "/pause"), "it does not wait at the barrier")
	harness.Read(t, n.fifo(id))
	rests(t, p.Child.PID, spec.Process.Args)
	return seenOf(t, p.Child.PID, id)
}

func (n *node) fifo(id string) string { return filepath.Join(n.dir, id, launch.FIFOFile) }

func (n *node) pause(t *testing.T, ctx context.Context, id string, spec *specs.Spec) (*launch.Launched, error) {
	dir := filepath.Dir(n.fifo(id))
	harness.Check(t, os.MkdirAll(dir, 0o755))
	return n.Pause(ctx, launch.Pause{ID: id, Dir: dir, Spec: spec, Cgroup: n.facts(id).CgroupConfig()})
}

// end ends what was launched, and removes its cgroups.
func (n *node) end(t *testing.T, l *launch.Launched) {
	harness.Check(t, l.Process.Signal(unix.SIGKILL))
	status := l.Child.Wait()
	harness.Want(t, status.Signal() == unix.SIGKILL, "it ended with %v", status)
	harness.Check(t, l.Process.Close())
	for _, dir := range l.Cgroups {
		err := os.Remove(dir)
		harness.Want(t, err == nil || os.IsNotExist(err), "%v", err)
	}
}

// What fails is named, is the container's fault unless its context has ended, and leaves nothing.
func TestPauseThatFails(t *testing.T) {
	n := newNode(t)
	ended, cancel := context.WithCancel(t.Context())
	cancel()
	for words, c := range map[string]struct {
		ctx    context.Context
		change func(*specs.Spec)
	}{
		"/absent": {t.Context(), func(s *specs.Spec) { s.Process.Args = []string{"/absent"} }},
		"msgmax":  {t.Context(), func(s *specs.Spec) { s.Linux.Sysctl = map[string]string{"kernel.msgmax": "words"} }},
		"waiting for its first process: context canceled": {ended, func(*specs.Spec) {}},
	} {
		spec := n.spec("failing0")
		c.change(spec)
		_, err := n.pause(t, c.ctx, "failing0", spec)
		harness.Check(t, n.facts("failing0").Remove())
		harness.Want(t, strings.Contains(fmt.Sprint(err), words) && errdefs.IsFailedPrecondition(err) == (c.ctx.Err() == nil),
			"%s: %v", words, err)
		nothingLeft(t)
	}
}

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
