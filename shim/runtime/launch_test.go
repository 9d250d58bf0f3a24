package runtime

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runc/libcontainer"
	_ "github.com/opencontainers/runc/libcontainer/nsenter" // this program is libcontainer's init, too
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/namespace"
)

func init() {
	if len(os.Args) > 1 && os.Args[1] == "init" {
		libcontainer.Init()
	}
}

// node is where pauses of a test are made.
type node struct {
	*Builtin
	rootfs, empty string
	parent        string // of their cgroups: a directory, or a slice
}

// bySystemd is as in package harness: systemd has to run this machine.
func bySystemd() bool { return os.Getenv("MINICRI_CGROUP_DRIVER") == "systemd" }

func newNode(t *testing.T) *node {
	t.Helper()
	dir, err := os.MkdirTemp("", "launch-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	shareMounts(t, dir)
	n := &node{
		Builtin: NewBuiltin(filepath.Join(dir, "states"), bySystemd()), parent: fmt.Sprintf("/minicri-launch-%d", os.Getpid()),
		rootfs: filepath.Join(dir, "rootfs"), empty: filepath.Join(dir, "empty"),
	}
	program, err := os.ReadFile("../../oci/pause/pause.elf")
	if err != nil {
		t.Fatalf("run `make build`: %v", err)
	}
	for _, made := range []string{n.empty, n.rootfs + "/proc", n.rootfs + "/dev"} {
		err = errors.Join(err, os.MkdirAll(made, 0o755))
	}
	err = errors.Join(err, os.Chmod(dir, 0o755), os.WriteFile(n.rootfs+"/pause", program, 0o111))
	if err != nil {
		t.Fatal(err)
	}
	// libcontainer does this to our process and for good as it loads its first filter
	// of devices (version 2 has no other): after the start of an init, but before a
	// launch.
	if err := unix.Setrlimit(unix.RLIMIT_MEMLOCK, &unix.Rlimit{Cur: unix.RLIM_INFINITY, Max: unix.RLIM_INFINITY}); err != nil && !errors.Is(err, unix.EPERM) {
		t.Fatal(err)
	}
	if bySystemd() {
		n.parent = fmt.Sprintf("minicrilaunch%d.slice", os.Getpid())
	}
	t.Cleanup(func() { n.removeParent(t) })
	return n
}

// shareMounts makes a directory what it is on a node, where systemd shares all mounts
// (systemd(1)), and fails the test if something is mounted in it in the end.
func shareMounts(t *testing.T, dir string) {
	t.Helper()
	if err := errors.Join(unix.Mount(dir, dir, "", unix.MS_BIND, ""), unix.Mount("", dir, "", unix.MS_SHARED, "")); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		// Not that of our main thread; see seenOf.
		for mount := range strings.Lines(read("/proc/thread-self/mountinfo")) {
			if strings.HasPrefix(strings.Fields(mount)[4], dir+"/") {
				t.Errorf("a mount is left on the node: %s", mount)
			}
		}
		if err := unix.Unmount(dir, unix.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
}

// leftCgroups are the cgroups below the parent, in any hierarchy.
func (n *node) leftCgroups() (left []string) {
	for _, hierarchy := range []string{"/sys/fs/cgroup/*", "/sys/fs/cgroup"} {
		found, _ := filepath.Glob(filepath.Join(hierarchy, n.parent, "*", "cgroup.procs"))
		left = append(left, found...)
	}
	return left
}

// removeParent fails the test if there is anything left below it.
func (n *node) removeParent(t *testing.T) {
	if left := n.leftCgroups(); len(left) > 0 {
		t.Errorf("left are %v", left)
	}
	if bySystemd() {
		n.stopSlice(t)
		return
	}
	groups, _ := filepath.Glob("/sys/fs/cgroup/*" + n.parent)
	for _, group := range append(groups, "/sys/fs/cgroup"+n.parent) {
		if err := os.Remove(group); err != nil && !os.IsNotExist(err) {
			t.Errorf("something is left: %v", err)
		}
	}
}

// stopSlice finds units that systemd still has, and ends the slice.
func (n *node) stopSlice(t *testing.T) {
	units, err := exec.Command("systemctl", "list-units", "--all", "--plain", "--no-legend", "minicrilaunch-*").CombinedOutput()
	if err != nil || len(units) > 0 {
		t.Errorf("systemd still has, %v:\n%s", err, units)
	}
	if said, err := exec.Command("systemctl", "stop", n.parent).CombinedOutput(); err != nil {
		t.Errorf("systemctl stop: %v: %s", err, said)
	}
}

// cgroupOf is where a container is, in the form of the driver.
func (n *node) cgroupOf(id string) string {
	if bySystemd() {
		return n.parent + ":minicrilaunch:" + id
	}
	return n.parent + "/" + id
}

// spec is that of a plain pod's pause.
func (n *node) spec(id string) *specs.Spec {
	shares, adjust := uint64(2), 100
	return &specs.Spec{
		Version: specs.Version,
		Root:    &specs.Root{Path: n.rootfs, Readonly: true},
		Process: &specs.Process{Args: []string{"/pause"}, Cwd: "/", NoNewPrivileges: true, Capabilities: &specs.LinuxCapabilities{}, OOMScoreAdj: &adjust},
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "bind", Source: n.empty, Options: []string{"bind", "ro", "nosuid", "noexec", "nodev"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: n.cgroupOf(id),
			Namespaces:  []specs.LinuxNamespace{{Type: specs.MountNamespace}, {Type: specs.UTSNamespace}, {Type: specs.IPCNamespace}, {Type: specs.PIDNamespace}},
			Resources:   &specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: &shares}},
			Seccomp:     profile("rt_sigprocmask", "rt_sigtimedwait", "wait4", "exit_group", "openat", "openat2", "write", "close", "execve", "close_range", "fcntl", "futex", "statx", "fstatfs", "fstat", "readlinkat", "getdents64", "epoll_ctl", "epoll_pwait", "mmap", "munmap", "madvise", "rt_sigaction", "sigaltstack", "rt_sigreturn", "nanosleep", "getpid", "tgkill", "gettid", "read", "dup3", "newfstatat", "lseek", "sched_yield", "prlimit64"),
		},
	}
}

// profile allows calls and refuses all others, as pause's default one does.
func profile(allowed ...string) *specs.LinuxSeccomp {
	errno := uint(unix.EPERM)
	return &specs.LinuxSeccomp{DefaultAction: specs.ActErrno, DefaultErrnoRet: &errno, Syscalls: []specs.LinuxSyscall{{Action: specs.ActAllow, Names: allowed}}}
}

// joined is a namespace of this process, as one to join.
func joined(kind specs.LinuxNamespaceType, name string) specs.LinuxNamespace {
	return specs.LinuxNamespace{Type: kind, Path: fmt.Sprintf("/proc/%d/ns/%s", os.Getpid(), name)}
}

// variants are what pods ask for of their pause.
var variants = map[string]func(*specs.Spec){
	"a plain pod": func(*specs.Spec) {},
	"its own host name and parameters": func(s *specs.Spec) {
		s.Hostname = "web-0"
		s.Linux.Sysctl = map[string]string{"kernel.shm_rmid_forced": "1", "kernel.msgmax": "4711"}
	},
	"a network namespace": func(s *specs.Spec) {
		s.Linux.Namespaces = append(s.Linux.Namespaces, joined(specs.NetworkNamespace, "net"))
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
	"memory and processes": func(s *specs.Spec) {
		limit, pids := int64(64<<20), int64(10)
		s.Linux.Resources.Memory = &specs.LinuxMemory{Limit: &limit}
		s.Linux.Resources.Pids = &specs.LinuxPids{Limit: &pids}
	},
}

// A process that is launched cannot be told from one that libcontainer's init
// became: not by what the kernel says of it, and not by libcontainer's state.
func TestLaunchedIsWhatInitBecomes(t *testing.T) {
	n, number := newNode(t), 0
	for name, change := range variants {
		t.Run(name, func(t *testing.T) {
			number++
			want := n.look(t, fmt.Sprintf("byinit%02d", number), change, (*builtinContainer).start)
			got := n.look(t, fmt.Sprintf("launched%02d", number), change, nil)
			for key := range want {
				if got[key] != want[key] {
					t.Errorf("%s:\n--- launched\n%s\n--- by init\n%s", key, got[key], want[key])
				}
			}
			if len(got) != len(want) {
				t.Errorf("%d facts, want %d", len(got), len(want))
			}
		})
	}
}

// look makes a pause, by start or else as Create does it, and returns what can be
// seen of it, with what differs from process to process taken out.
func (n *node) look(t *testing.T, id string, change func(*specs.Spec), start func(*builtinContainer, *libcontainer.Process, Streams, *tree) (*Process, error)) map[string]string {
	t.Helper()
	spec := n.spec(id)
	change(spec)
	c, init, err := n.make(id, spec, start)
	if err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = init.Signal(syscall.SIGKILL)
		init.Wait()
		if err := errors.Join(c.Delete(), init.Close()); err != nil {
			t.Error(err)
		}
		if _, err := os.Stat(filepath.Join(n.root, id)); !os.IsNotExist(err) {
			t.Errorf("the state is left: %v", err)
		}
	}()
	if err := c.Start(); err != nil {
		t.Fatal(err)
	}
	proc := "/proc/" + strconv.Itoa(init.PID)
	for deadline := time.Now().Add(time.Minute); read(proc+"/cmdline") != "/pause\x00" || !strings.HasPrefix(field(read(proc+"/status"), "State:"), "S"); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("pause does not come to rest: %q", read(proc+"/cmdline"))
		}
	}
	seen := seenOf(init.PID, id)
	pid := regexp.MustCompile(`\b` + strconv.Itoa(init.PID) + `\b`) // not a part of 4294967295
	for key, value := range seen {
		if key == "oom_score_adj" { // the pid may be the same number
			continue
		}
		seen[key] = pid.ReplaceAllString(strings.ReplaceAll(value, id, "ID"), "PID")
	}
	return seen
}

// make is Create, or with start the same by libcontainer's init.
func (n *node) make(id string, spec *specs.Spec, start func(*builtinContainer, *libcontainer.Process, Streams, *tree) (*Process, error)) (Container, *Process, error) {
	if start == nil {
		config, err := toConfig(spec, id, n.systemdCgroup, n.noNewKeyring)
		if err != nil {
			return nil, nil, err
		}
		process, err := newProcess(spec.Process)
		if err != nil {
			return nil, nil, err
		}
		if why := needsInit(config, process, Streams{}); why != "" {
			return nil, nil, fmt.Errorf("it is not launched: %s", why)
		}
		return n.Create(id, "/nowhere", spec, Streams{})
	}
	config, err := toConfig(spec, id, n.systemdCgroup, n.noNewKeyring)
	if err != nil {
		return nil, nil, err
	}
	process, err := newProcess(spec.Process)
	if err != nil {
		return nil, nil, err
	}
	process.Init = true
	lib, err := libcontainer.Create(n.root, id, config)
	if err != nil {
		return nil, nil, err
	}
	c := n.container(lib)
	init, err := start(c, process, Streams{}, nil)
	return c, init, errors.Join(err, func() error {
		if err != nil {
			return destroy(lib, process)
		}
		return c.findCgroups()
	}())
}

func read(path string) string {
	content, err := os.ReadFile(path)
	if err != nil {
		return err.Error()
	}
	return string(content)
}

func field(status, name string) string {
	for line := range strings.Lines(status) {
		if value, ok := strings.CutPrefix(line, name); ok {
			return strings.TrimSpace(value)
		}
	}
	return ""
}

// seenOf is what the kernel says of a process, the container's init.
func seenOf(pid int, id string) map[string]string {
	proc := "/proc/" + strconv.Itoa(pid)
	seen := map[string]string{}
	for _, name := range []string{"attr/current", "attr/exec", "attr/fscreate", "cgroup", "limits", "oom_score_adj", "cmdline", "environ", "comm", "sessionid", "loginuid", "timerslack_ns", "personality", "coredump_filter", "uid_map"} {
		seen[name] = read(proc + "/" + name)
	}
	for _, name := range []string{"exe", "cwd", "root", "fd/0", "fd/1", "fd/2"} {
		target, err := os.Readlink(proc + "/" + name)
		seen[name] = fmt.Sprint(target, err)
	}
	descriptors, _ := filepath.Glob(proc + "/fd/*")
	seen["descriptors"] = strings.ReplaceAll(fmt.Sprint(descriptors), proc, "")
	// Our parent's are ours. libcontainer may leave our main thread in the mount
	// namespace of a container (goCreateMountSources).
	ours, _ := filepath.Glob(fmt.Sprintf("/proc/%d/ns/*", os.Getppid()))
	for _, path := range ours {
		ours, _ := os.Readlink(path)
		its, _ := os.Readlink(proc + "/ns/" + filepath.Base(path))
		seen["ns/"+filepath.Base(path)] = fmt.Sprint("as ours: ", its == ours)
	}
	volatile := regexp.MustCompile(`(?m)^(FDSize|SigQ|Vm\w*|Rss\w*|Hugetlb\w*|voluntary\w*|nonvoluntary\w*|x86_\w*|PPid):.*\n`)
	seen["status"] = volatile.ReplaceAllString(read(proc+"/status"), "")
	// What libcontainer's init binds is a slave of a mount that the node shares.
	ids := regexp.MustCompile(`(?m)^\d+ \d+ \d+:\d+ |master:\d+ `)
	// Newer kernels list them in the order in which they were made, which is another.
	mounts := slices.Sorted(strings.Lines(ids.ReplaceAllString(read(proc+"/mountinfo"), "")))
	seen["mountinfo"] = strings.Join(mounts, "")
	stat := strings.Fields(read(proc + "/stat"))
	seen["group, session, terminal"] = strings.Join(stat[4:7], " ")
	seen["priority, nice, threads"] = strings.Join(stat[17:20], " ")
	seen["keyring"] = keyring(id)
	seen["root of who joins the mounts"] = rootOfJoined(pid)
	for _, enter := range []string{"--uts hostname", "--ipc cat /proc/sys/kernel/shm_rmid_forced /proc/sys/kernel/msgmax"} {
		output, err := exec.Command("nsenter", append([]string{"--target", strconv.Itoa(pid)}, strings.Fields(enter)...)...).CombinedOutput()
		seen[enter] = fmt.Sprint(string(output), err)
	}
	return seen
}

// rootOfJoined lists the root that a process gets that joins the mount namespace of another,
// and what is above it.
func rootOfJoined(pid int) string {
	var names []string
	err := namespace.OnDisposableThread(func() error {
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

// What fails is named, is the container's fault, and leaves nothing.
func TestLaunchThatFails(t *testing.T) {
	n := newNode(t)
	for words, change := range map[string]func(*specs.Spec){
		"/absent": func(s *specs.Spec) { s.Process.Args = []string{"/absent"} },
		"msgmax":  func(s *specs.Spec) { s.Linux.Sysctl = map[string]string{"kernel.msgmax": "words"} },
		"/nodir":  func(s *specs.Spec) { s.Mounts[1].Destination = "/nodir" },
	} {
		spec := n.spec("failing0")
		change(spec)
		_, _, err := n.make("failing0", spec, nil)
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(fmt.Sprint(err), words) {
			t.Errorf("%s: %v", words, err)
		}
		if states, _ := os.ReadDir(n.root); len(states) > 0 || len(n.leftCgroups()) > 0 {
			t.Errorf("%s: left are %v, %v", words, states, n.leftCgroups())
		}
	}
}
