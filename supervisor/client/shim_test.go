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
	"runtime/debug"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
	"github.com/minicri/minicri/test/harness"
)

var (
	shimBinary   string // the real minicri-shim, built once
	cgroupParent = fmt.Sprintf("/minicri-unit-client-%d-%d", os.Getpid(), time.Now().UnixNano())
)

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
	info, _ := debug.ReadBuildInfo() // with the race detector when the tests are
	race := slices.Contains(info.Settings, debug.BuildSetting{Key: "-race", Value: "true"})
	cmd := exec.Command("go", "build", fmt.Sprint("-race=", race), "-tags", "seccomp,runc_nocriu", "-o", shimBinary, "../../cmd/minicri-shim")
	cmd.Env = append(os.Environ(), "CGO_ENABLED=1")
	if out, err := cmd.CombinedOutput(); err != nil {
		return fmt.Errorf("%w: %s", err, out)
	}
	return nil
}

// pod is a shim with a directory of its own.
type pod struct {
	t    testing.TB
	dir  string
	held map[string]*client.Held
	*client.Client
}

func startPod(t testing.TB) *pod {
	t.Helper()
	p := &pod{t: t, dir: t.TempDir(), held: make(map[string]*client.Held)}
	var err error
	if p.Client, err = start(t.Context(), p.dir); err != nil {
		log, _ := os.ReadFile(filepath.Join(p.dir, "shim.log"))
		t.Fatalf("%v\n%s", err, log)
	}
	t.Cleanup(p.end)
	return p
}

// start starts a supervisor and connects to it.
func start(ctx context.Context, dir string) (*client.Client, error) {
	if err := client.StartSupervisor(ctx, client.StartOptions{Binary: shimBinary, Dir: dir}); err != nil {
		return nil, err
	}
	return client.Connect(ctx, dir, new(atomic.Int64))
}

// end removes all containers and the supervisor, and checks that it is gone.
func (p *pod) end() {
	ctx := harness.Limited(p.t)
	list, err := p.List(ctx)
	refused := p.Shutdown(ctx)
	harness.Want(p.t, len(list) == 0 || errdefs.IsFailedPrecondition(refused), "shutdown with a container: %v, want failed precondition", refused)
	for _, c := range list {
		_ = p.Kill(ctx, c.Id, 9, true)
		p.awaitExit(ctx, c.Id)
		err = errors.Join(err, p.Delete(ctx, c.Id, false))
	}
	err = errors.Join(err, p.Shutdown(ctx))
	harness.Want(p.t, err == nil, "%v", err)
	_ = p.Close()
	log, _ := os.ReadFile(filepath.Join(p.dir, "shim.log"))
	harness.Want(p.t, !p.t.Failed(), "shim.log: %s", log)
	harness.Want(p.t, !bytes.Contains(log, []byte("DATA RACE")), "shim.log: %s", log)
	harness.Want(p.t, !bytes.Contains(log, []byte("panic")), "shim.log: %s", log)
}

func (p *pod) check(err error) { harness.Check(p.t, err) }

func (p *pod) eventually(what string, holds func() bool) {
	harness.Eventually(p.t, what, holds)
}

// succeed kills the shim, and starts its successor. Shells are reaped, and no other containers.
func (p *pod) succeed() {
	p.killShim()
	reapOrphans()
	p.restart()
}

// wantExec runs a script in a container, and wants that it writes this.
func (p *pod) wantExec(id, script, want string) {
	o := client.ExecOptions{Container: id, Process: sh(script)}
	r, err := p.ExecSync(p.t.Context(), o, time.Minute, 100, new(client.Captured))
	harness.Need(p.t, err == nil, "%q in %s: %+v, %v", script, id, r, err)
	harness.Want(p.t, r.Code == 0, "%q in %s: %+v, %v", script, id, r, err)
	harness.Want(p.t, string(r.Stdout) == want, "%q in %s: %+v, %v", script, id, r, err)
}

// exec starts a script in a container.
func (p *pod) exec(id, script string, apart bool) *client.Exec {
	e, err := p.Exec(p.t.Context(), client.ExecOptions{Container: id, Process: sh(script), Apart: apart})
	p.check(err)
	return e
}

// awaitFile waits until a file has the words.
func (p *pod) awaitFile(path, words string) {
	p.eventually(words+" comes to be in "+path, func() bool {
		content, _ := os.ReadFile(path)
		return strings.Contains(string(content), words)
	})
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

func (p *pod) awaitExit(ctx context.Context, id string) (c *api.Container) {
	p.eventually("container "+id+" ends", func() (ended bool) {
		var err error
		c, err = p.state(ctx, id)
		p.check(err)
		return c.Exit != nil
	})
	return c
}

// change has a container differ.
type change = func(*specs.Spec, *api.CreateRequest)

// create makes a container that runs a busybox shell script.
func (p *pod) create(id, script string, changes ...change) *api.CreateResponse {
	answer, err := p.Create(p.t.Context(), p.bundle(id, script, changes...))
	p.check(err)
	p.held[id] = client.Hold("", p.dir, id, process.Facts{PID: int(answer.Pid), StartTime: answer.StartTime}) // as the daemon does
	p.t.Cleanup(p.held[id].Close)
	return answer
}

func (p *pod) bundle(id, script string, changes ...change) *api.CreateRequest {
	request := &api.CreateRequest{Id: id, Bundle: p.t.TempDir(), LogPath: p.logPath(id)}
	spec := containerSpec(p.t, id, script)
	for _, c := range changes {
		c(spec, request)
	}
	content, err := json.Marshal(spec)
	p.check(errors.Join(err, os.WriteFile(filepath.Join(request.Bundle, "config.json"), content, 0o600)))
	return request
}

func (p *pod) run(id, script string, changes ...change) *api.CreateResponse {
	answer := p.create(id, script, changes...)
	p.check(p.Start(p.t.Context(), id))
	return answer
}

func (p *pod) logPath(id string) string { return filepath.Join(p.dir, id+".log") }

func (p *pod) log(id string) string { return string(harness.Read(p.t, p.logPath(id))) }

func sh(script string) *specs.Process {
	return &specs.Process{
		Args: []string{"/bin/sh", "-c", script}, Cwd: "/", NoNewPrivileges: true,
		Env: []string{"PATH=/bin", "HOME=/"}, Capabilities: &specs.LinuxCapabilities{}, OOMScoreAdj: new(100),
	}
}

func containerSpec(t testing.TB, id, script string) *specs.Spec {
	rootfs := t.TempDir()
	for _, dir := range []string{"bin", "proc", "dev", "tmp"} {
		harness.Check(t, os.Mkdir(filepath.Join(rootfs, dir), 0o755))
	}
	content, err := os.ReadFile("/bin/busybox") // Debian's busybox-static
	harness.Check(t, errors.Join(err, os.WriteFile(rootfs+"/bin/sh", content, 0o755)))
	for _, applet := range []string{"busybox", "sleep", "true", "seq", "head"} {
		harness.Check(t, os.Link(rootfs+"/bin/sh", rootfs+"/bin/"+applet))
	}
	return &specs.Spec{
		Version: "1.3.0", Root: &specs.Root{Path: rootfs}, Process: sh(script),
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

func TestCreateFailureLeavesNothing(t *testing.T) {
	p := startPod(t)
	for id, unfit := range harness.Sorted(map[string]struct {
		change
		says string
	}{
		"absent": {func(s *specs.Spec, _ *api.CreateRequest) { s.Process.Args = []string{"/absent"} }, "/absent"},
		"unrecorded": {func(s *specs.Spec, _ *api.CreateRequest) { // init waits at the barrier when its record cannot be written
			s.Hooks = &specs.Hooks{CreateRuntime: []specs.Hook{{Path: "/bin/mkdir", Args: []string{"mkdir", p.dir + "/records/unrecorded.json.new"}}}}
		}, "is a directory"},
	}) {
		_, err := p.Create(t.Context(), p.bundle(id, "", unfit.change))
		harness.Want(t, err != nil && strings.Contains(err.Error(), unfit.says), "%s: error %v, want one with %q", id, err, unfit.says)
		for _, pattern := range []string{p.dir + "/containers/*", p.dir + "/io/*", p.dir + "/records/*", p.dir + "/exits/*", cgroupDir(id)} {
			left, _ := filepath.Glob(pattern)
			harness.Want(t, len(left) == 0, "%s: left: %v", id, left)
		}
	}
}

// cgroupDir is the directory of a container's cgroup, in one hierarchy of version 1 or in version 2 alone.
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

// pid is the supervisor's.
func (p *pod) pid() (pid int) {
	p.eventually("a process has the lock", func() bool {
		pid, _ = api.LockHolder(p.dir)
		return pid != 0
	})
	return pid
}

func (p *pod) killShim() { p.check(syscall.Kill(p.pid(), syscall.SIGKILL)) }

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
