package client_test

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
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

// A client that has gone before it could wait takes its exec with it at once.
func TestExecWaitOfAClientThatIsGone(t *testing.T) {
	p := startPod(t)
	p.run("c", "sleep 1000")
	before := p.processes("c")
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
	if after := p.processes("c"); !slices.Equal(after, before) {
		t.Errorf("before %v, after %v", before, after)
	}
}
