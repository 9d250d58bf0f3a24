package runtime_test

import (
	"bufio"
	"encoding/json"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// shimBinary is the real minicri-shim, built once for all tests.
var shimBinary string

// cgroupParent is where all cgroups of this run live.
var cgroupParent = fmt.Sprintf("/minicri-test-%d", os.Getpid())

func TestMain(m *testing.M) {
	dir, err := os.MkdirTemp("", "minicri-shim-test-")
	if err == nil {
		err = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	}
	if err == nil {
		shimBinary, err = buildShim(dir)
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "build minicri-shim (needs gcc, pkg-config, libseccomp-dev):", err)
		os.Exit(1)
	}
	code := m.Run()
	if left := testCgroups(); len(left) > 0 {
		fmt.Fprintln(os.Stderr, "cgroups left behind:", left)
		code = 1
	}
	removeTestCgroups()
	_ = os.RemoveAll(dir)
	os.Exit(code)
}

func buildShim(dir string) (string, error) {
	path := filepath.Join(dir, "minicri-shim")
	cmd := exec.Command("go", "build", "-trimpath", "-tags", "seccomp,runc_nocriu", "-ldflags", "-s -w", "-o", path, "../../cmd/minicri-shim")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	out, err := cmd.CombinedOutput()
	if err != nil {
		return "", fmt.Errorf("%w: %s", err, out)
	}
	if out, err := exec.Command("../../oci/pause/build.sh").CombinedOutput(); err != nil {
		return "", fmt.Errorf("build pause: %w: %s", err, out)
	}
	return path, nil
}

// testCgroups lists the cgroups below cgroupParent in all hierarchies, the
// parent itself not included.
func testCgroups() []string {
	below, _ := filepath.Glob("/sys/fs/cgroup/*" + cgroupParent + "/*/cgroup.procs")
	unified, _ := filepath.Glob("/sys/fs/cgroup" + cgroupParent + "/*/cgroup.procs")
	return append(below, unified...)
}

func removeTestCgroups() {
	parents, _ := filepath.Glob("/sys/fs/cgroup/*" + cgroupParent)
	for _, parent := range append(parents, "/sys/fs/cgroup"+cgroupParent) {
		_ = os.Remove(parent)
	}
}

func TestPauseStarts(t *testing.T) {
	p := startPause(t, pauseSpec(t, "starts"))
	ready := p.line(t)
	if ready.Error != "" || ready.PID == 0 || ready.StartTime == 0 {
		t.Fatalf("prepare: %+v", ready)
	}
	if exe := readlink(t, ready.PID); strings.HasSuffix(exe, "/pause") {
		t.Fatalf("pause runs before the word: %s", exe)
	}
	p.say(t, "start\n")
	if started := p.line(t); !started.Started {
		t.Fatalf("start: %+v", started)
	}
	if exe := readlink(t, ready.PID); exe != "/pause" {
		t.Errorf("pid %d runs %s, want /pause", ready.PID, exe)
	}
	if code := p.wait(t); code != 0 {
		t.Errorf("exit code %d, want 0", code)
	}
	if err := syscall.Kill(ready.PID, syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	waitGone(t, ready.PID)
	removePodCgroup(t, "starts")
}

func TestPauseTakesBack(t *testing.T) {
	for name, refuse := range map[string]func(p *pauseCommand){
		"eof":     func(p *pauseCommand) { _ = p.stdin.Close() },
		"word":    func(p *pauseCommand) { _, _ = io.WriteString(p.stdin, "stop\n") },
		"sigterm": func(p *pauseCommand) { _ = p.cmd.Process.Signal(syscall.SIGTERM) },
	} {
		t.Run(name, func(t *testing.T) {
			p := startPause(t, pauseSpec(t, "back-"+name))
			ready := p.line(t)
			if ready.PID == 0 {
				t.Fatalf("prepare: %+v", ready)
			}
			refuse(p)
			if answer := p.line(t); !strings.Contains(answer.Error, "wait for the word") {
				t.Errorf("answer %+v, want an error that names the step", answer)
			}
			if code := p.wait(t); code != 1 {
				t.Errorf("exit code %d, want 1", code)
			}
			p.wantNothingLeft(t, ready.PID)
		})
	}
}

func TestPauseFailureLeavesNothing(t *testing.T) {
	spec := pauseSpec(t, "fails")
	spec.Process.Args = []string{"/absent"}
	p := startPause(t, spec)
	if answer := p.line(t); !strings.HasPrefix(answer.Error, "prepare: ") || !strings.Contains(answer.Error, "/absent") {
		t.Errorf("answer %+v, want an error of step prepare that names /absent", answer)
	}
	if code := p.wait(t); code != 1 {
		t.Errorf("exit code %d, want 1", code)
	}
	p.wantNothingLeft(t, 0)
}

func TestPauseJoinsNamespaces(t *testing.T) {
	holder := exec.Command("sleep", "60")
	ids := []syscall.SysProcIDMap{{ContainerID: 0, HostID: 100000, Size: 65536}}
	holder.SysProcAttr = &syscall.SysProcAttr{
		Cloneflags:  syscall.CLONE_NEWUSER | syscall.CLONE_NEWNET | syscall.CLONE_NEWIPC | syscall.CLONE_NEWUTS,
		UidMappings: ids,
		GidMappings: ids,
	}
	if err := holder.Start(); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = holder.Process.Kill(); _ = holder.Wait() })

	spec := pauseSpec(t, "userns")
	joined := map[specs.LinuxNamespaceType]string{specs.UserNamespace: "user", specs.NetworkNamespace: "net", specs.IPCNamespace: "ipc", specs.UTSNamespace: "uts"}
	spec.Linux.Namespaces = slices.DeleteFunc(spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool { return joined[n.Type] != "" })
	for kind, file := range joined {
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: kind, Path: fmt.Sprintf("/proc/%d/ns/%s", holder.Process.Pid, file)})
	}
	p := startPause(t, spec)
	ready := p.line(t)
	if ready.PID == 0 {
		t.Fatalf("prepare: %+v", ready)
	}
	for _, file := range joined {
		want, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", holder.Process.Pid, file))
		got, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", ready.PID, file))
		if got != want || got == "" {
			t.Errorf("%s namespace %q, want %q", file, got, want)
		}
	}
	p.say(t, "start\n")
	if started := p.line(t); !started.Started {
		t.Errorf("start: %+v", started)
	}
	p.wait(t)
	_ = syscall.Kill(ready.PID, syscall.SIGKILL)
	waitGone(t, ready.PID)
	removePodCgroup(t, "userns")
}

// pauseCommand is a running `minicri-shim pause`.
type pauseCommand struct {
	cmd    *exec.Cmd
	stdin  io.WriteCloser
	stdout *bufio.Reader
	root   string
	id     string
}

type pauseLine struct {
	PID       int    `json:"pid"`
	StartTime uint64 `json:"start_time"`
	Started   bool   `json:"started"`
	Error     string `json:"error"`
}

func startPause(t testing.TB, spec *specs.Spec) *pauseCommand {
	t.Helper()
	bundle, root := t.TempDir(), t.TempDir()
	content, err := json.Marshal(spec)
	if err != nil {
		t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(bundle, "config.json"), content, 0o600); err != nil {
		t.Fatal(err)
	}
	id := filepath.Base(spec.Linux.CgroupsPath)
	cmd := exec.Command(shimBinary, "pause", "--root", root, "--id", id, "--bundle", bundle)
	stdin, err := cmd.StdinPipe()
	if err != nil {
		t.Fatal(err)
	}
	stdout, err := cmd.StdoutPipe()
	if err != nil {
		t.Fatal(err)
	}
	cmd.Stderr = os.Stderr
	if err := cmd.Start(); err != nil {
		t.Fatal(err)
	}
	return &pauseCommand{cmd: cmd, stdin: stdin, stdout: bufio.NewReader(stdout), root: root, id: id}
}

func (p *pauseCommand) line(t testing.TB) pauseLine {
	t.Helper()
	text, err := p.stdout.ReadString('\n')
	if err != nil {
		t.Fatalf("read a line of minicri-shim pause: %v", err)
	}
	var line pauseLine
	if err := json.Unmarshal([]byte(text), &line); err != nil {
		t.Fatalf("line %q: %v", text, err)
	}
	return line
}

func (p *pauseCommand) say(t testing.TB, word string) {
	t.Helper()
	if _, err := io.WriteString(p.stdin, word); err != nil {
		t.Fatal(err)
	}
}

func (p *pauseCommand) wait(t testing.TB) int {
	t.Helper()
	_ = p.cmd.Wait() // the exit code is looked at
	return p.cmd.ProcessState.ExitCode()
}

// wantNothingLeft fails the test if a process, a cgroup or state is left.
func (p *pauseCommand) wantNothingLeft(t testing.TB, pid int) {
	t.Helper()
	if pid != 0 && syscall.Kill(pid, 0) == nil {
		t.Errorf("pid %d is left", pid)
	}
	if entries, _ := os.ReadDir(p.root); len(entries) > 0 {
		t.Errorf("state is left: %v", entries)
	}
	for _, cgroup := range testCgroups() {
		if strings.Contains(cgroup, "/"+p.id+"/") {
			t.Errorf("cgroup is left: %s", cgroup)
		}
	}
}

// pauseSpec is a pod's pause as the daemon asks for it, in cgroup
// cgroupParent/id with a root file system that holds nothing but pause.
func pauseSpec(t testing.TB, id string) *specs.Spec {
	t.Helper()
	rootfs := t.TempDir()
	elf, err := os.ReadFile("../../oci/pause/pause.elf")
	if err != nil {
		t.Fatalf("read the pause program, build it with oci/pause/build.sh: %v", err)
	}
	if err := os.WriteFile(filepath.Join(rootfs, "pause"), elf, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, dir := range []string{rootfs, filepath.Dir(rootfs), filepath.Dir(filepath.Dir(rootfs))} {
		_ = os.Chmod(dir, 0o755) // user namespaces must be able to reach it
	}
	for _, dir := range []string{"proc", "dev"} {
		if err := os.Mkdir(filepath.Join(rootfs, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	return &specs.Spec{
		Version: "1.3.0",
		Root:    &specs.Root{Path: rootfs, Readonly: true},
		Process: &specs.Process{
			Args: []string{"/pause"}, Cwd: "/", NoNewPrivileges: true,
			User:         specs.User{UID: 65535, GID: 65535},
			Capabilities: &specs.LinuxCapabilities{},
			OOMScoreAdj:  new(-998),
		},
		Hostname: "pod",
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc", Options: []string{"nosuid", "noexec", "nodev"}},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755", "size=64k"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: cgroupParent + "/" + id,
			Namespaces: []specs.LinuxNamespace{
				{Type: specs.PIDNamespace},
				{Type: specs.NetworkNamespace},
				{Type: specs.IPCNamespace},
				{Type: specs.UTSNamespace},
				{Type: specs.MountNamespace},
			},
			Resources: &specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: new(uint64(2))}},
			Seccomp: &specs.LinuxSeccomp{
				DefaultAction: specs.ActAllow,
				Architectures: []specs.Arch{specs.ArchX86_64},
				Syscalls:      []specs.LinuxSyscall{{Names: []string{"mount", "ptrace", "bpf"}, Action: specs.ActErrno}},
			},
		},
	}
}

func readlink(t testing.TB, pid int) string {
	t.Helper()
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		t.Fatal(err)
	}
	return exe
}

// waitGone waits for the end of a process that was left to us, the sub-reaper.
func waitGone(t testing.TB, pid int) {
	t.Helper()
	timeout := time.AfterFunc(5*time.Second, func() { panic(fmt.Sprintf("pid %d does not end", pid)) })
	defer timeout.Stop()
	if _, err := syscall.Wait4(pid, nil, 0, nil); err != nil {
		t.Fatalf("wait for pid %d: %v", pid, err)
	}
}

// removePodCgroup takes away the cgroup of a pause that was started: it
// outlives the one-shot, and is the daemon's to remove.
func removePodCgroup(t testing.TB, id string) {
	t.Helper()
	for _, procs := range testCgroups() {
		if strings.HasSuffix(procs, "/"+id+"/cgroup.procs") {
			if err := os.Remove(filepath.Dir(procs)); err != nil {
				t.Error(err)
			}
		}
	}
}

func BenchmarkPause(b *testing.B) {
	spec := pauseSpec(b, "bench")
	var prepare, start []time.Duration
	for b.Loop() {
		begin := time.Now()
		p := startPause(b, spec)
		ready := p.line(b)
		prepare = append(prepare, time.Since(begin))
		begin = time.Now()
		p.say(b, "start\n")
		p.line(b)
		p.wait(b)
		start = append(start, time.Since(begin))
		_ = syscall.Kill(ready.PID, syscall.SIGKILL)
		waitGone(b, ready.PID)
		removePodCgroup(b, "bench")
	}
	slices.Sort(prepare)
	slices.Sort(start)
	b.ReportMetric(prepare[len(prepare)/2].Seconds()*1e3, "prepare-p50-ms")
	b.ReportMetric(prepare[0].Seconds()*1e3, "prepare-min-ms")
	b.ReportMetric(start[0].Seconds()*1e3, "start-min-ms")
	b.ReportMetric(start[len(start)/2].Seconds()*1e3, "start-p50-ms")
}
