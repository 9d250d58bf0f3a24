package launch_test

import (
	"context"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"os/signal"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
	"unsafe"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/net/bpf"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/bundle"
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
	n, number := newNode(t), time.Now().UnixNano() // the kernel lists the keyrings of all runs on the machine
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
		pid, err = n.ask(starter.Request{Verb: starter.Create, Container: bundle.Container{ID: id}})
	}
	if err == nil {
		_, err = os.ReadFile(filepath.Join(n.dir, "states", id, launch.FIFOFile))
	}
	harness.Check(t, err)
	t.Cleanup(func() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		gone(t, pid)
		_, err := n.ask(starter.Request{Verb: starter.Delete, Container: bundle.Container{ID: id}})
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
	for words, c := range harness.Sorted(map[string]struct {
		ctx    context.Context
		change func(*specs.Spec)
	}{
		"/absent": {t.Context(), func(s *specs.Spec) { s.Process.Args = []string{"/absent"} }},
		"msgmax":  {t.Context(), func(s *specs.Spec) { s.Linux.Sysctl = map[string]string{"kernel.msgmax": "words"} }},
		"waiting for its first process: context canceled": {ended, func(*specs.Spec) {}},
	}) {
		spec := n.spec("failing0")
		c.change(spec)
		_, err := n.pause(t, c.ctx, "failing0", spec)
		harness.Check(t, n.facts("failing0").Remove())
		harness.Want(t, strings.Contains(fmt.Sprint(err), words) && errdefs.IsFailedPrecondition(err) == (c.ctx.Err() == nil),
			"%s: %v", words, err)
		nothingLeft(t)
	}
}

// A shortage while the program launch is put into memory fails the launches of its time, and no later one.
func TestLaunchAfterAShortage(t *testing.T) {
	n := newNode(t)
	var usual unix.Rlimit
	harness.Check(t, unix.Getrlimit(unix.RLIMIT_FSIZE, &usual))
	signal.Ignore(unix.SIGXFSZ)
	defer signal.Reset(unix.SIGXFSZ)
	harness.Check(t, unix.Setrlimit(unix.RLIMIT_FSIZE, &unix.Rlimit{Max: usual.Max}))
	_, short := n.pause(t, t.Context(), "short", n.spec("short"))
	harness.Check(t, errors.Join(unix.Setrlimit(unix.RLIMIT_FSIZE, &usual), n.facts("short").Remove()))
	harness.Want(t, errors.Is(short, unix.EFBIG), "in the shortage: %v", short)
	made, err := n.pause(t, t.Context(), "short", n.spec("short"))
	harness.Need(t, err == nil, "after it: %v", err)
	n.end(t, made)
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
	for name, profile := range harness.Sorted(map[string]*specs.LinuxSeccomp{
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
	}) {
		spec := *c.spec
		spec.Linux = &specs.Linux{Namespaces: c.spec.Linux.Namespaces, Seccomp: profile}
		_, err := c.node.Template(&spec)
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
	for name, nnp := range harness.Sorted(map[string]bool{"no new privileges": true, "privileges that it may get": false}) {
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

// seenOf is what the kernel says of a process of a container, with what differs from process to process taken out.
func seenOf(t *testing.T, pid int, id string) map[string]string {
	proc := "/proc/" + strconv.Itoa(pid)
	seen := map[string]string{}
	for _, name := range []string{"attr/current", "attr/exec", "attr/fscreate", "attr/keycreate", "cgroup", "limits", "oom_score_adj", "cmdline", "environ", "comm", "sessionid", "loginuid", "timerslack_ns", "personality", "coredump_filter", "uid_map"} {
		seen[name] = read(proc + "/" + name)
	}
	for _, name := range []string{"exe", "cwd", "root"} {
		target, err := os.Readlink(proc + "/" + name)
		seen[name] = fmt.Sprint(target, err)
	}
	descriptors, _ := filepath.Glob(proc + "/fd/*")
	seen["descriptors"] = strings.ReplaceAll(fmt.Sprint(descriptors), proc, "")
	ours, _ := filepath.Glob(fmt.Sprintf("/proc/%d/ns/*", os.Getpid()))
	for _, path := range ours {
		ours, _ := os.Readlink(path)
		its, _ := os.Readlink(proc + "/ns/" + filepath.Base(path))
		seen["ns/"+filepath.Base(path)] = fmt.Sprint("as ours: ", its == ours)
	}
	volatile := regexp.MustCompile(`(?m)^(FDSize|SigQ|Vm\w*|Rss\w*|Hugetlb\w*|voluntary\w*|nonvoluntary\w*|x86_\w*|PPid):.*\n`)
	inside := regexp.MustCompile(`(?m)^(NS\w+:\s+\d+)\s+\d+$`) // pids of the namespace are counted
	seen["status"] = inside.ReplaceAllString(volatile.ReplaceAllString(read(proc+"/status"), ""), "$1")
	// What libcontainer's init binds is a slave of a mount that the node shares.
	ids := regexp.MustCompile(`(?m)^\d+ \d+ \d+:\d+ |master:\d+ `)
	// Newer kernels list them in the order in which they were made, which is another.
	mounts := slices.Sorted(strings.Lines(ids.ReplaceAllString(read(proc+"/mountinfo"), "")))
	seen["mountinfo"] = strings.Join(mounts, "")
	stat := strings.Fields(read(proc + "/stat"))
	seen["group, session, terminal"] = strings.Join(stat[4:7], " ")
	seen["priority, nice, threads"] = strings.Join(stat[17:20], " ")
	seen["keyring"] = keyring(id)
	seen["seccomp"] = seccompOf(t, pid)
	seen["root of who joins the mounts"] = rootOfJoined(pid)
	for _, enter := range []string{"--uts hostname", "--ipc cat /proc/sys/kernel/shm_rmid_forced /proc/sys/kernel/msgmax"} {
		output, status := command(t, "nsenter", append([]string{"--target", strconv.Itoa(pid)}, strings.Fields(enter)...)...)
		seen[enter] = fmt.Sprint(output, status)
	}
	for key, value := range seen {
		seen[key] = strings.NewReplacer(id, "ID", proc+"/", "/proc/PID/").Replace(value)
	}
	// Nowhere else: a limit, a user or a system call may have the pid's number.
	own := regexp.MustCompile(`(?m)^(Tgid:|Pid:|NS\w+:)\s+` + strconv.Itoa(pid) + `$`)
	seen["status"] = own.ReplaceAllString(seen["status"], "$1 PID")
	group := regexp.MustCompile(`\b` + strconv.Itoa(pid) + `\b`)
	seen["group, session, terminal"] = group.ReplaceAllString(seen["group, session, terminal"], "PID")
	return seen
}

// rootOfJoined lists the root that a process gets that joins the mount namespace of another, and what is above it.
func rootOfJoined(pid int) string {
	var names []string
	err := process.OnDisposableThread(func() error {
		mounts, err := os.Open(fmt.Sprintf("/proc/%d/ns/mnt", pid))
		if err != nil {
			return err
		}
		defer mounts.Close()
		// Threads share the working directory, and one that does cannot join.
		if err := errors.Join(unix.Unshare(unix.CLONE_FS), unix.Setns(int(mounts.Fd()), unix.CLONE_NEWNS)); err != nil {
			return err
		}
		for _, dir := range []string{"/", "/.."} {
			entries, err := os.ReadDir(dir)
			if err != nil {
				return err
			}
			for _, entry := range entries {
				names = append(names, entry.Name())
			}
		}
		return nil
	})
	return fmt.Sprint(names, err)
}

// keyring is the session keyring of a container: permissions, owner, name. That of
// one that has ended may still be there for a while.
func keyring(id string) string {
	for line := range strings.Lines(read("/proc/keys")) {
		if fields := strings.Fields(line); strings.Contains(line, "_ses."+id) {
			return strings.Join(fields[4:], " ")
		}
	}
	return "none"
}

// filtersOf are the seccomp filters that a process has loaded, newest first, as
// ptrace(2) gives them to its caller, who waits for the process by that.
func filtersOf(pid int) (filters []string, err error) {
	runtime.LockOSThread() // who traces is a thread
	defer runtime.UnlockOSThread()
	if err := errors.Join(unix.PtraceSeize(pid), unix.PtraceInterrupt(pid)); err != nil {
		return nil, err
	}
	if _, err := unix.Wait4(pid, nil, unix.WALL, nil); err != nil {
		return nil, err
	}
	for index := uintptr(0); ; index++ {
		var buffer [4096]bpf.RawInstruction
		n, _, errno := unix.Syscall6(unix.SYS_PTRACE, unix.PTRACE_SECCOMP_GET_FILTER, uintptr(pid), index, uintptr(unsafe.Pointer(&buffer)), 0, 0)
		if errno == unix.ENOENT || errno == unix.EINVAL {
			return filters, unix.PtraceDetach(pid)
		}
		if errno != 0 {
			return nil, errno
		}
		decisions, err := decisionsOf(buffer[:n])
		if err != nil {
			return nil, err
		}
		filters = append(filters, decisions)
	}
}

// decisionsOf are what a filter decides, on calls of some architectures with some arguments: each
// decision with the first number that it is of.
func decisionsOf(program []bpf.RawInstruction) (decisions string, err error) {
	instructions, _ := bpf.Disassemble(program)
	vm, err := bpf.NewVM(instructions)
	if err != nil {
		return "", err
	}
	for _, arch := range []uint32{unix.AUDIT_ARCH_X86_64, unix.AUDIT_ARCH_I386, unix.AUDIT_ARCH_AARCH64} {
		for _, first := range []uint32{0, 1, 2, 3, 8, 9, 0x10000000} { // an argument, as those of pause_test.go
			decisions += fmt.Sprintf("\n%x %x:", arch, first)
			last := -1
			for i := range uint32(1201) { // calls, those of x32, and none
				number := i%600 + i/600<<30
				if i == 1200 {
					number = math.MaxUint32
				}
				var call []byte // struct seccomp_data, which the machine takes for a packet
				for _, word := range []uint32{number, arch, 0, 0, 0, first, 0, 1} {
					call = binary.BigEndian.AppendUint32(call, word)
				}
				decision, err := vm.Run(append(call, make([]byte, 32)...))
				if err != nil {
					return "", err
				}
				if decision != last {
					decisions += fmt.Sprintf(" %x->%x", number, decision)
				}
				last = decision
			}
		}
	}
	return decisions, nil
}
