package client_test

import (
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"math/rand/v2"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

var (
	shimBinary   string // the real minicri-shim, built once
	cgroupParent = fmt.Sprintf("/minicri-unit-client-%d", os.Getpid())
)

const busybox = "/bin/busybox" // Debian's busybox-static

func TestMain(m *testing.M) {
	if dir := os.Getenv(lockEnv); dir != "" {
		holdLock(dir)
	}
	dir, err := os.MkdirTemp("", "minicri-client-test-")
	if err == nil {
		err = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
	}
	if err == nil {
		shimBinary = filepath.Join(dir, "minicri-shim")
		err = buildShim()
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, "build minicri-shim (needs gcc, pkg-config, libseccomp-dev):", err)
		os.Exit(1)
	}
	code := m.Run()
	_ = os.RemoveAll(dir)
	for _, pattern := range []string{"/sys/fs/cgroup/*" + cgroupParent, "/sys/fs/cgroup" + cgroupParent} {
		parents, _ := filepath.Glob(pattern)
		for _, parent := range parents {
			if err := os.Remove(parent); err != nil {
				fmt.Fprintln(os.Stderr, "cgroups are left behind:", err)
				code = 1
			}
		}
	}
	os.Exit(code)
}

func buildShim() error {
	args := append([]string{"build", "-tags", "seccomp,runc_nocriu", "-o", shimBinary}, raceFlags...)
	cmd := exec.Command("go", append(args, "../../cmd/minicri-shim")...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// pod is a shim with a directory of its own.
type pod struct {
	t           testing.TB
	dir, binary string
	*client.Client
}

func startPod(t testing.TB) *pod {
	t.Helper()
	return startPodOf(t, shimBinary)
}

// startPodOf is startPod with another build of the shim.
func startPodOf(t testing.TB, binary string) *pod {
	t.Helper()
	p := &pod{t: t, dir: t.TempDir(), binary: binary}
	p.start()
	t.Cleanup(p.end)
	return p
}

func (p *pod) start() {
	p.t.Helper()
	c, err := client.Start(p.t.Context(), client.StartOptions{Binary: p.binary, Dir: p.dir})
	if err != nil {
		log, _ := os.ReadFile(filepath.Join(p.dir, "shim.log"))
		p.t.Fatalf("%v\n%s", err, log)
	}
	p.Client = c
}

// end removes all containers and the shim, and checks that it is gone.
func (p *pod) end() {
	ctx, cancel := context.WithTimeout(context.Background(), time.Minute)
	defer cancel()
	list, err := p.List(ctx)
	if err != nil {
		p.t.Errorf("list: %v", err)
	}
	for _, c := range list {
		_ = p.Kill(ctx, c.Id, 9, true)
		p.awaitExit(ctx, c.Id)
		if err := p.Delete(ctx, c.Id, false); err != nil {
			p.t.Error(err)
		}
	}
	if err := p.Shutdown(ctx); err != nil {
		p.t.Errorf("shutdown: %v", err)
	}
	_ = p.Close()
	log, _ := os.ReadFile(filepath.Join(p.dir, "shim.log"))
	if p.t.Failed() || bytes.Contains(log, []byte("DATA RACE")) || bytes.Contains(log, []byte("panic")) {
		p.t.Errorf("shim.log: %s", log)
	}
}

// state finds a container in the list.
func (p *pod) state(ctx context.Context, id string) (*api.Container, error) {
	list, err := p.List(ctx)
	if err != nil {
		return nil, err
	}
	for _, c := range list {
		if c.GetId() == id {
			return c, nil
		}
	}
	return nil, fmt.Errorf("container %s: %w", id, errdefs.ErrNotFound)
}

func (p *pod) awaitExit(ctx context.Context, id string) *api.Container {
	p.t.Helper()
	for {
		c, err := p.state(ctx, id)
		if err != nil {
			p.t.Fatalf("state of %s: %v", id, err)
		}
		if c.Exit != nil {
			return c
		}
		select {
		case <-ctx.Done():
			p.t.Fatalf("container %s does not end", id)
		case <-time.After(time.Millisecond):
		}
	}
}

// create makes a container that runs a busybox shell script.
func (p *pod) create(id, script string, change ...func(*specs.Spec, *api.CreateRequest)) *api.CreateResponse {
	p.t.Helper()
	answer, err := p.Create(p.t.Context(), p.bundle(id, script, change...))
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(client.HoldOutput(p.dir, id).Close) // as the daemon does
	return answer
}

func (p *pod) bundle(id, script string, change ...func(*specs.Spec, *api.CreateRequest)) *api.CreateRequest {
	p.t.Helper()
	request := &api.CreateRequest{Id: id, Bundle: p.t.TempDir(), LogPath: p.logPath(id), Runtime: strings.Fields(os.Getenv("SHIM_TEST_RUNTIME"))}
	spec := containerSpec(p.t, id, script)
	for _, c := range change {
		c(spec, request)
	}
	content, err := json.Marshal(spec)
	if err != nil {
		p.t.Fatal(err)
	}
	if err := os.WriteFile(filepath.Join(request.Bundle, "config.json"), content, 0o600); err != nil {
		p.t.Fatal(err)
	}
	return request
}

func (p *pod) run(id, script string, change ...func(*specs.Spec, *api.CreateRequest)) *api.CreateResponse {
	p.t.Helper()
	answer := p.create(id, script, change...)
	if err := p.Start(p.t.Context(), id); err != nil {
		p.t.Fatal(err)
	}
	return answer
}

func (p *pod) logPath(id string) string { return filepath.Join(p.dir, id+".log") }

func (p *pod) log(id string) string {
	p.t.Helper()
	content, err := os.ReadFile(p.logPath(id))
	if err != nil {
		p.t.Fatal(err)
	}
	var text strings.Builder
	for line := range strings.Lines(string(content)) {
		fields := strings.SplitN(line, " ", 4)
		if len(fields) < 4 {
			p.t.Fatalf("log line %q", line)
		}
		text.WriteString(fields[3])
	}
	return text.String()
}

func sh(script string) *specs.Process {
	return &specs.Process{
		Args: []string{"/bin/sh", "-c", script}, Cwd: "/", NoNewPrivileges: true,
		Env: []string{"PATH=/bin", "HOME=/"}, Capabilities: &specs.LinuxCapabilities{}, OOMScoreAdj: new(100),
	}
}

func containerSpec(t testing.TB, id, script string) *specs.Spec {
	t.Helper()
	rootfs := t.TempDir()
	for _, dir := range []string{"bin", "proc", "dev", "tmp"} {
		if err := os.Mkdir(filepath.Join(rootfs, dir), 0o755); err != nil {
			t.Fatal(err)
		}
	}
	content, err := os.ReadFile(busybox)
	if err != nil {
		t.Fatalf("read busybox (apt-get install busybox-static): %v", err)
	}
	if err := os.WriteFile(filepath.Join(rootfs, "bin/sh"), content, 0o755); err != nil {
		t.Fatal(err)
	}
	for _, applet := range []string{"busybox", "sleep", "true", "cat", "yes", "seq", "dd", "head", "stty", "kill"} {
		if err := os.Link(filepath.Join(rootfs, "bin/sh"), filepath.Join(rootfs, "bin", applet)); err != nil {
			t.Fatal(err)
		}
	}
	return &specs.Spec{
		Version: "1.3.0",
		Root:    &specs.Root{Path: rootfs},
		Process: sh(script),
		Mounts: []specs.Mount{
			{Destination: "/proc", Type: "proc", Source: "proc"},
			{Destination: "/dev", Type: "tmpfs", Source: "tmpfs", Options: []string{"nosuid", "mode=755", "size=64k"}},
			{Destination: "/dev/pts", Type: "devpts", Source: "devpts", Options: []string{"nosuid", "noexec", "newinstance", "ptmxmode=0666", "mode=0620"}},
		},
		Linux: &specs.Linux{
			CgroupsPath: cgroupParent + "/" + id,
			Namespaces:  []specs.LinuxNamespace{{Type: specs.PIDNamespace}, {Type: specs.IPCNamespace}, {Type: specs.MountNamespace}},
			Resources:   &specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: new(uint64(100))}},
		},
	}
}

func TestLifeOfAContainer(t *testing.T) {
	p := startPod(t)
	ctx := t.Context()
	events := make(chan *api.Event, 16)
	go func() {
		_ = p.Events(ctx, 0, func(e *api.Event) error { events <- e; return nil })
	}()
	created := p.create("life", "echo out; echo err >&2; printf tail; exit 7")
	if s, _ := p.state(ctx, "life"); s.Status != api.Status_STATUS_CREATED || s.Pid != created.Pid {
		t.Errorf("state after create: %v", s)
	}
	if err := p.Start(ctx, "life"); err != nil {
		t.Fatal(err)
	}
	stopped := p.awaitExit(ctx, "life")
	if e := stopped.Exit; e.Code != 7 || !e.CodeKnown || e.OomKilled || e.FinishedAt < stopped.StartedAt {
		t.Errorf("exit %v, want code 7", e)
	}
	if got := p.log("life"); !strings.Contains(got, "out\n") || !strings.Contains(got, "err\n") || !strings.Contains(got, "tail\n") {
		t.Errorf("log %q", got)
	}
	var exit api.ExitRecord
	content, err := os.ReadFile(filepath.Join(p.dir, api.ExitDir, "life.json"))
	if err != nil || json.Unmarshal(content, &exit) != nil || exit.Code != 7 {
		t.Errorf("exit on disk %s, %v", content, err)
	}
	if err := p.Kill(ctx, "life", 15, false); !errdefs.IsNotFound(err) {
		t.Errorf("kill of a stopped container: %v, want not found", err)
	}
	if err := p.Shutdown(ctx); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("shutdown with a container: %v, want failed precondition", err)
	}
	if err := p.Delete(ctx, "life", false); err != nil {
		t.Fatal(err)
	}
	if _, err := p.state(ctx, "life"); !errdefs.IsNotFound(err) {
		t.Errorf("state of a deleted container: %v, want not found", err)
	}
	for i, kind := range []api.EventKind{api.EventKind_EVENT_CREATED, api.EventKind_EVENT_STARTED, api.EventKind_EVENT_EXITED, api.EventKind_EVENT_DELETED} {
		if e := <-events; e.Kind != kind || e.Seq != uint64(i+1) {
			t.Errorf("event %d is %v", i, e)
		}
	}
}

func TestCreateFailureLeavesNothing(t *testing.T) {
	p := startPod(t)
	spec := containerSpec(t, "fails", "true")
	spec.Process.Args = []string{"/absent"}
	bundle := t.TempDir()
	content, _ := json.Marshal(spec)
	_ = os.WriteFile(filepath.Join(bundle, "config.json"), content, 0o600)
	_, err := p.Create(t.Context(), &api.CreateRequest{Id: "fails", Bundle: bundle})
	if err == nil || !strings.Contains(err.Error(), "/absent") {
		t.Errorf("error %v, want one that names /absent", err)
	}
	for _, pattern := range []string{"containers/*", "io/*", "records/*", "exits/*"} {
		if left, _ := filepath.Glob(filepath.Join(p.dir, pattern)); len(left) > 0 {
			t.Errorf("left: %v", left)
		}
	}
	if left, _ := filepath.Glob("/sys/fs/cgroup/*" + cgroupParent + "/fails"); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
}

func TestKillAndDelete(t *testing.T) {
	p := startPod(t)
	p.run("k", "trap '' TERM; sleep 1000 & sleep 1000 & wait; sleep 1000")
	for deadline := time.Now().Add(time.Minute); len(p.processes("k")) < 3; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("the container has no children")
		}
	}
	if err := p.Delete(t.Context(), "k", false); !errdefs.IsFailedPrecondition(err) {
		t.Errorf("delete of a running container: %v", err)
	}
	if err := p.Kill(t.Context(), "k", 9, false); err != nil {
		t.Fatal(err)
	}
	if e := p.awaitExit(t.Context(), "k").Exit; e.Code != 137 || e.OomKilled {
		t.Errorf("exit %v, want 137", e)
	}
}

// TestExecTimeoutEndsTheTree is properties 36 and 58.
func TestExecTimeoutEndsTheTree(t *testing.T) {
	p := startPod(t)
	p.run("c", "sleep 1000")
	before := p.processes("c")
	r, err := p.ExecSync(t.Context(), "c", sh("(setsid sleep 300 &) ; sleep 300 & trap '' TERM; sleep 300"), 200*time.Millisecond, 100)
	if err != nil || !r.TimedOut || r.Code != 137 {
		t.Fatalf("%+v, %v", r, err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		after := p.processes("c")
		if slices.Equal(before, after) {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("processes %v, want %v", after, before)
		}
	}
	if s, _ := p.state(t.Context(), "c"); s.Status != api.Status_STATUS_RUNNING {
		t.Errorf("container is %v", s.Status)
	}
}

// cgroupDir is the directory of a container's cgroup, in one hierarchy of version 1
// or in version 2 alone.
func cgroupDir(id string) string {
	hierarchy := "/sys/fs/cgroup/pids"
	if cgroup.Unified() {
		hierarchy = "/sys/fs/cgroup"
	}
	return filepath.Join(hierarchy, cgroupParent, id)
}

// processes lists the pids in a container's cgroup and below.
func (p *pod) processes(id string) []string {
	var pids []string
	_ = filepath.WalkDir(cgroupDir(id), func(path string, _ os.DirEntry, _ error) error {
		content, _ := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		pids = append(pids, strings.Fields(string(content))...)
		return nil
	})
	slices.Sort(pids)
	return pids
}

func TestExecStreams(t *testing.T) {
	p := startPod(t)
	p.run("c", "sleep 1000")
	ctx := t.Context()
	if err := p.ExecStart(ctx, "c", "e1", sh("cat; echo bye >&2; exit 5"), true); err != nil {
		t.Fatal(err)
	}
	stdin, stdout, stderr := p.stream("c", "e1", api.Stdin), p.stream("c", "e1", api.Stdout), p.stream("c", "e1", api.Stderr)
	code := make(chan int32, 1)
	go func() { c, _ := p.ExecWait(ctx, "c", "e1"); code <- c }()
	fmt.Fprint(stdin, "hello")
	_ = stdin.CloseWrite()
	if out, _ := io.ReadAll(stdout); string(out) != "hello" {
		t.Errorf("stdout %q", out)
	}
	if out, _ := io.ReadAll(stderr); string(out) != "bye\n" {
		t.Errorf("stderr %q", out)
	}
	if c := <-code; c != 5 {
		t.Errorf("code %d", c)
	}
}

func (p *pod) stream(id, exec, name string) *net.UnixConn {
	p.t.Helper()
	conn, err := p.Stream(p.t.Context(), id, exec, name)
	if err != nil {
		p.t.Fatal(err)
	}
	p.t.Cleanup(func() { _ = conn.Close() })
	return conn
}

// TestExecStdinIsByteIdentical is property 38.
func TestExecStdinIsByteIdentical(t *testing.T) {
	p := startPod(t)
	p.run("c", "sleep 1000")
	ctx := t.Context()
	if err := p.ExecStart(ctx, "c", "e", sh("cat; exit 9"), true); err != nil {
		t.Fatal(err)
	}
	stdin, stdout := p.stream("c", "e", api.Stdin), p.stream("c", "e", api.Stdout)
	code := make(chan int32, 1)
	go func() { c, _ := p.ExecWait(ctx, "c", "e"); code <- c }()
	const total = 500 << 20
	sent, got := sha256.New(), sha256.New()
	go func() {
		block := make([]byte, 1<<20)
		source := rand.NewChaCha8([32]byte{1})
		for range total / len(block) {
			_, _ = source.Read(block)
			sent.Write(block)
			if _, err := stdin.Write(block); err != nil {
				t.Error(err)
				return
			}
		}
		_ = stdin.CloseWrite()
	}()
	n, err := io.Copy(got, stdout)
	if err != nil || n != total || !bytes.Equal(sent.Sum(nil), got.Sum(nil)) {
		t.Errorf("%d bytes came back, %v, or they differ", n, err)
	}
	if c := <-code; c != 9 {
		t.Errorf("code %d", c)
	}
}

func TestTerminal(t *testing.T) {
	p := startPod(t)
	p.run("c", "stty size; read line; echo got $line; exit 4", func(s *specs.Spec, r *api.CreateRequest) {
		s.Process.Terminal, r.Stdin = true, true
		s.Process.ConsoleSize = &specs.Box{Width: 100, Height: 30}
	})
	ctx := t.Context()
	stdin := p.stream("c", "", api.Stdin)
	fmt.Fprint(stdin, "word\n")
	if e := p.awaitExit(ctx, "c").Exit; e.Code != 4 {
		t.Errorf("exit %v", e)
	}
	if got := p.log("c"); !strings.Contains(got, "30 100") || !strings.Contains(got, "got word") {
		t.Errorf("log %q", got)
	}
	p.run("d", "sleep 1000")
	process := sh("read x; stty size")
	process.Terminal = true
	if err := p.ExecStart(ctx, "d", "e", process, true); err != nil {
		t.Fatal(err)
	}
	in, out := p.stream("d", "e", api.Stdin), p.stream("d", "e", api.Stdout)
	if err := p.Resize(ctx, "d", "e", 77, 22); err != nil {
		t.Fatal(err)
	}
	fmt.Fprint(in, "\n")
	code := make(chan int32, 1)
	go func() { c, _ := p.ExecWait(ctx, "d", "e"); code <- c }()
	if text, _ := io.ReadAll(out); !strings.Contains(string(text), "22 77") {
		t.Errorf("terminal of an exec says %q", text)
	}
	if c := <-code; c != 0 {
		t.Errorf("code %d", c)
	}
}

// TestOOM is property 33.
func TestOOM(t *testing.T) {
	limit := func(s *specs.Spec, _ *api.CreateRequest) {
		s.Linux.Resources.Memory = &specs.LinuxMemory{Limit: new(int64(24 << 20)), Swap: new(int64(24 << 20))}
	}
	p := startPod(t)
	hog := "dd if=/dev/zero of=/dev/null bs=64M count=1"
	p.run("init", "exec "+hog, limit)
	if e := p.awaitExit(t.Context(), "init").Exit; e.Code != 137 || !e.OomKilled {
		t.Errorf("init killed for lack of memory: %v", e)
	}
	p.run("child", hog+"; echo went on; sleep 1000", limit)
	p.awaitInLog("child", "went on")
	if err := p.Kill(t.Context(), "child", 9, false); err != nil {
		t.Fatal(err)
	}
	if e := p.awaitExit(t.Context(), "child").Exit; e.Code != 137 || e.OomKilled {
		t.Errorf("killed after the OOM of a child: %v", e)
	}
}

// TestUpdateIsAllOrNothing is property 42.
func TestUpdateIsAllOrNothing(t *testing.T) {
	p := startPod(t)
	p.run("c", "sleep 1000")
	read := func(file string) string {
		content, _ := os.ReadFile("/sys/fs/cgroup/" + strings.Split(file, ".")[0] + cgroupParent + "/c/" + file)
		return strings.TrimSpace(string(content))
	}
	if err := p.Update(t.Context(), "c", &specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: new(uint64(333))}}, nil); err != nil {
		t.Fatal(err)
	}
	if got := read("cpu.shares"); got != "333" {
		t.Errorf("cpu.shares %s", got)
	}
	bad := &specs.LinuxResources{CPU: &specs.LinuxCPU{Shares: new(uint64(444)), Cpus: "900"}, Memory: &specs.LinuxMemory{Limit: new(int64(64 << 20))}}
	memory := read("memory.limit_in_bytes")
	if err := p.Update(t.Context(), "c", bad, nil); err == nil {
		t.Error("cpuset 900 was accepted")
	}
	if got := read("cpu.shares"); got != "333" || read("memory.limit_in_bytes") != memory {
		t.Errorf("after a refused update: cpu.shares %s, memory %s", got, read("memory.limit_in_bytes"))
	}
	if r, err := p.ExecSync(t.Context(), "c", sh("true"), 0, 10); err != nil || r.Code != 0 {
		t.Errorf("exec after updates: %+v, %v", r, err)
	}
}

// TestKilledShim is property 34, and what the design says of a shim that dies.
func TestKilledShim(t *testing.T) {
	p := startPod(t)
	var root string
	p.run("runs", "i=0; while true; do i=$((i+1)); echo $i; sleep 0.002; done")
	p.create("waits", "exit 6")
	p.run("ends", "until [ -e /tmp/end ]; do sleep 0.01; done; exit 8", func(s *specs.Spec, _ *api.CreateRequest) { root = s.Root.Path })
	p.awaitInLog("runs", " 10\n")
	p.killShim()
	if _, err := p.List(t.Context()); !errdefs.IsUnavailable(err) {
		t.Errorf("list without a shim: %v, want unavailable", err)
	}
	time.Sleep(50 * time.Millisecond)
	p.start()
	reapOrphans() // before one ends: the kernel knows the status when it is reaped, and it is awaited for 2.5 s
	if err := os.WriteFile(filepath.Join(root, "tmp", "end"), nil, 0o600); err != nil {
		t.Fatal(err)
	}
	ctx := t.Context()
	if s, err := p.state(ctx, "runs"); err != nil || s.Status != api.Status_STATUS_RUNNING || !s.Adopted {
		t.Fatalf("adopted container: %v, %v", s, err)
	}
	if err := p.Start(ctx, "waits"); err != nil {
		t.Errorf("start of an adopted container: %v", err)
	}
	if r, err := p.ExecSync(ctx, "runs", sh("echo hi"), 0, 10); err != nil || string(r.Stdout) != "hi\n" {
		t.Errorf("exec in an adopted container: %+v, %v", r, err)
	}
	for id, code := range map[string]int32{"waits": 6, "ends": 8} {
		if e := p.awaitExit(ctx, id).Exit; e.CodeKnown && e.Code != code || !e.CodeKnown && hasExitInfo() {
			t.Errorf("exit of adopted %s: %v, want %d", id, e, code)
		}
	}
	if err := p.Kill(ctx, "runs", 9, false); err != nil {
		t.Fatal(err)
	}
	p.awaitExit(ctx, "runs")
	for i, line := range strings.Fields(p.log("runs")) {
		if line != strconv.Itoa(i+1) {
			t.Fatalf("log line %d is %q: one was lost with the shim", i+1, line)
		}
	}
}

// pid is the supervisor's.
func (p *pod) pid() int {
	p.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		pid, err := api.LockHolder(p.dir)
		if err == nil && pid != 0 {
			return pid
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("no process has the lock: %v", err)
		}
	}
}

func (p *pod) killShim() {
	p.t.Helper()
	if err := syscall.Kill(p.pid(), syscall.SIGKILL); err != nil {
		p.t.Fatal(err)
	}
}

// reapOrphans plays the daemon, the sub-reaper: containers of a killed shim
// are left to it. It ends with the test binary.
var reapOrphans = sync.OnceFunc(func() {
	go func() {
		for ; ; time.Sleep(5 * time.Millisecond) {
			content, _ := os.ReadFile(fmt.Sprintf("/proc/self/task/%d/children", os.Getpid()))
			for pid := range strings.FieldsSeq(string(content)) {
				comm, _ := os.ReadFile("/proc/" + pid + "/comm")
				if n, _ := strconv.Atoi(pid); strings.TrimSpace(string(comm)) == "sh" {
					_, _ = syscall.Wait4(n, nil, syscall.WNOHANG, nil)
				}
			}
		}
	}()
})

// hasExitInfo reports whether the kernel keeps exit codes in pidfds: Linux 6.15.
func hasExitInfo() bool {
	var name unix.Utsname
	_ = unix.Uname(&name)
	var major, minor int
	_, _ = fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor)
	return major > 6 || major == 6 && minor >= 15
}

// TestExecCyclesLeakNothing is property 37, with 1000 cycles if the environment
// asks for long tests as a whole.
func TestExecCyclesLeakNothing(t *testing.T) {
	cycles := 150
	if os.Getenv("MINICRI_TEST_WHOLE") != "" {
		cycles = 1000
	}
	p := startPod(t)
	p.run("c", "sleep 1000")
	for i := range 20 { // what is opened once, for the first of each kind
		p.cycle(i)
	}
	time.Sleep(300 * time.Millisecond)
	before := p.census()
	for i := range cycles {
		p.cycle(i)
	}
	var after census
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		if after = p.census(); after.fds <= before.fds && after.processes == before.processes && after.cgroups == before.cgroups {
			break
		}
		p.cycle(0) // removes cgroups whose last process ended after their exec
		time.Sleep(300 * time.Millisecond)
	}
	t.Logf("before %+v, after %+v", before, after)
	if after.fds > before.fds || after.processes != before.processes || after.cgroups != before.cgroups {
		t.Errorf("left behind: before %+v, after %+v", before, after)
	}
}

// cycle runs one exec: to its end, cancelled, or left half-way.
func (p *pod) cycle(i int) {
	ctx, cancel := context.WithCancel(p.t.Context())
	defer cancel()
	switch i % 5 {
	case 0, 1:
		if r, err := p.ExecSync(ctx, "c", sh("true"), 0, 100); err != nil || r.Code != 0 {
			p.t.Fatalf("cycle %d: %+v, %v", i, r, err)
		}
	case 2:
		time.AfterFunc(8*time.Millisecond, cancel)
		if _, err := p.ExecSync(ctx, "c", sh("sleep 100 & yes"), 0, 1<<30); err == nil {
			p.t.Fatalf("cycle %d: a cancelled exec succeeded", i)
		}
	default:
		id := fmt.Sprint("e", i)
		if err := p.ExecStart(ctx, "c", id, sh("yes"), true); err != nil {
			p.t.Fatal(err)
		}
		in, out := p.stream("c", id, api.Stdin), p.stream("c", id, api.Stdout)
		time.AfterFunc(3*time.Millisecond, func() { _, _ = in.Close(), out.Close() })
		if i%5 == 4 {
			time.AfterFunc(3*time.Millisecond, cancel)
		}
		if _, err := p.ExecWait(ctx, "c", id); err != nil && !errors.Is(err, context.Canceled) {
			p.t.Fatalf("cycle %d: %v", i, err)
		}
	}
}

// A client that has gone before it could wait takes its exec with it at once.
func TestExecWaitOfAClientThatIsGone(t *testing.T) {
	p := startPod(t)
	p.run("c", "sleep 1000")
	before := p.census()
	if err := p.ExecStart(t.Context(), "c", "e", sh("sleep 1000 & sleep 1000"), false); err != nil {
		t.Fatal(err)
	}
	gone, cancel := context.WithCancel(t.Context())
	cancel()
	if _, err := p.ExecWait(gone, "c", "e"); !errors.Is(err, context.Canceled) {
		t.Errorf("got %v", err)
	}
	if err := p.ExecKill(t.Context(), "c", "e", 0, false); !errdefs.IsNotFound(err) {
		t.Errorf("the exec is still known: %v", err)
	}
	if after := p.census(); after.processes != before.processes {
		t.Errorf("before %+v, after %+v", before, after)
	}
}

type census struct{ fds, threads, processes, cgroups int }

func (p *pod) census() census {
	p.t.Helper()
	out, err := exec.Command("fuser", filepath.Join(p.dir, "lock")).Output()
	if err != nil {
		p.t.Fatalf("find the shim (needs fuser of psmisc): %v", err)
	}
	shim := "/proc/" + strings.TrimSpace(string(out))
	fds, _ := os.ReadDir(shim + "/fd")
	threads, _ := os.ReadDir(shim + "/task")
	cgroups, _ := filepath.Glob(cgroupDir("c") + "/*/cgroup.procs")
	return census{len(fds), len(threads), len(p.processes("c")), len(cgroups)}
}

// TestLogRotation is property 39: at full speed, with renames and reopens.
func TestLogRotation(t *testing.T) {
	p := startPod(t)
	const lines = 3_000_000
	p.run("c", fmt.Sprintf("exec seq %d", lines))
	files := []string{}
	for running := true; running; {
		s, err := p.state(t.Context(), "c")
		if err != nil {
			t.Fatal(err)
		}
		running = s.Exit == nil
		old := fmt.Sprintf("%s.%03d", p.logPath("c"), len(files))
		if err := os.Rename(p.logPath("c"), old); err != nil {
			t.Fatal(err)
		}
		files = append(files, old)
		if err := p.ReopenLog(t.Context(), "c"); err != nil && running {
			if s, _ = p.state(t.Context(), "c"); s.Exit == nil {
				time.Sleep(20 * time.Millisecond) // the end of the log came first
			}
			break
		}
		time.Sleep(20 * time.Millisecond)
	}
	next := 1
	for _, file := range append(files, p.logPath("c")) {
		content, err := os.ReadFile(file)
		if err != nil {
			continue // the last rename had no reopen
		}
		for line := range strings.Lines(string(content)) {
			if !strings.HasSuffix(line, fmt.Sprintf(" F %d\n", next)) {
				t.Fatalf("%s: %q, want %d", file, line, next)
			}
			next++
		}
	}
	if next != lines+1 || len(files) < 3 {
		t.Errorf("%d lines in %d files, want %d", next-1, len(files), lines)
	}
}
