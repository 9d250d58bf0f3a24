package container

import (
	"bytes"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/api"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-client/pkg/logs"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

func TestMain(m *testing.M) {
	if name := os.Getenv(api.PluginNameEnvVar); name != "" { // of the daemon of a test
		bePlugin(name)
		os.Exit(1)
	}
	os.Exit(nodetest.Main(m))
}

const (
	created = runtimeapi.ContainerState_CONTAINER_CREATED
	running = runtimeapi.ContainerState_CONTAINER_RUNNING
	exited  = runtimeapi.ContainerState_CONTAINER_EXITED
)

// pod is a pod of a test, on a node with the image.
type pod struct {
	*nodetest.Node
	t      testing.TB
	id     string
	config *runtimeapi.PodSandboxConfig
}

// newNode makes a node with the image, for a test that runs beside others.
func newNode(t testing.TB, opts ...nodetest.Option) *nodetest.Node {
	n := nodetest.New(t, append(opts, nodetest.Parallel())...)
	n.ImportBusybox()
	return n
}

func newPod(t testing.TB, opts ...nodetest.PodOption) *pod {
	return runPod(t, newNode(t), "web", opts...)
}

func runPod(t testing.TB, n *nodetest.Node, name string, opts ...nodetest.PodOption) *pod {
	config := n.PodConfig(name, opts...)
	return &pod{Node: n, t: t, id: n.RunPod(config), config: config}
}

type option func(*runtimeapi.ContainerConfig)

// shell is the configuration of a container that runs a script.
func shell(name, script string, opts ...option) *runtimeapi.ContainerConfig {
	config := nodetest.Container(name, "/bin/sh", "-c", script)
	for _, opt := range opts {
		opt(config)
	}
	return config
}

func attempt(number uint32) option {
	return func(c *runtimeapi.ContainerConfig) { c.Metadata.Attempt = number }
}

func noLog(c *runtimeapi.ContainerConfig)          { c.LogPath = "" }
func privileged(c *runtimeapi.ContainerConfig)     { c.Linux.SecurityContext.Privileged = true }
func privilegedPod(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.Privileged = true }

func asUser(uid int64) option {
	return func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.RunAsUser = &runtimeapi.Int64Value{Value: uid}
	}
}

func command(words ...string) option {
	return func(c *runtimeapi.ContainerConfig) { c.Command = words }
}

// forever is a script that says when it is ready, and ends at SIGTERM and SIGUSR1 with these codes.
const forever = "trap 'exit 15' TERM; trap 'exit 10' USR1; echo ready; while true; do sleep 0.02; done"

func (p *pod) tryCreate(config *runtimeapi.ContainerConfig) (string, error) {
	answer, err := p.Runtime.CreateContainer(harness.Limited(p.t), &runtimeapi.CreateContainerRequest{PodSandboxId: p.id, Config: config, SandboxConfig: p.config})
	return answer.GetContainerId(), err
}

func (p *pod) createErr(config *runtimeapi.ContainerConfig) error {
	_, err := p.tryCreate(config)
	return err
}

func (p *pod) create(config *runtimeapi.ContainerConfig) string {
	id, err := p.tryCreate(config)
	check(p.t, err)
	return id
}

func (p *pod) start(id string) error {
	return nodetest.Err(p.t, p.Runtime.StartContainer, &runtimeapi.StartContainerRequest{ContainerId: id})
}

func (p *pod) run(name, script string, opts ...option) string {
	id := p.create(shell(name, script, opts...))
	check(p.t, p.start(id))
	return id
}

// output runs a script to its end and returns what it wrote; it fails the test unless the script succeeds.
func (p *pod) output(name, script string, opts ...option) string {
	id := p.run(name, script, opts...)
	end := p.awaitExit(id)
	stdout, stderr := p.logs(id)
	expect(p.t, end.ExitCode == 0, "%s: %q ended with %d: %s%s", name, script, end.ExitCode, stdout, stderr)
	return strings.TrimSpace(stdout)
}

func (p *pod) stop(id string, seconds int64) error {
	return nodetest.Err(p.t, p.Runtime.StopContainer, &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: seconds})
}

func (p *pod) remove(id string) error {
	return nodetest.Err(p.t, p.Runtime.RemoveContainer, &runtimeapi.RemoveContainerRequest{ContainerId: id})
}

func (p *pod) list(filter *runtimeapi.ContainerFilter) []*runtimeapi.Container {
	return nodetest.Call(p.t, p.Runtime.ListContainers, &runtimeapi.ListContainersRequest{Filter: filter}).Containers
}

func (p *pod) status(id string) *runtimeapi.ContainerStatus {
	return nodetest.Call(p.t, p.Runtime.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: id}).Status
}

// info is what the verbose status shows, as far as tests use it.
type info struct {
	PID         int    `json:"pid"`
	SandboxID   string `json:"sandboxID"`
	Snapshot    string `json:"snapshot"`
	Privileged  bool   `json:"privileged"`
	CgroupsPath string `json:"cgroupsPath"`
	RuntimeSpec struct {
		Process struct {
			Args []string `json:"args"`
			Env  []string `json:"env"`
		} `json:"process"`
	} `json:"runtimeSpec"`
}

func (p *pod) info(id string) (i info) {
	answer := nodetest.Call(p.t, p.Runtime.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: id, Verbose: true})
	check(p.t, json.Unmarshal([]byte(answer.Info["info"]), &i))
	i.CgroupsPath = cgroup.Path(i.CgroupsPath)
	return i
}

func (p *pod) awaitExit(id string) (end *runtimeapi.ContainerStatus) {
	harness.Eventually(p.t, "container "+id+" has ended", func() bool {
		end = p.status(id)
		return end.State == exited
	})
	return end
}

func (p *pod) wantExit(id string, code int32, reason string) {
	end := p.awaitExit(id)
	expect(p.t, end.ExitCode == code && end.Reason == reason, "want exit code %d, reason %s; got %v", code, reason, end)
	times := []int64{1, end.CreatedAt, end.StartedAt, end.FinishedAt, time.Now().UnixNano()}
	expect(p.t, slices.IsSorted(times), "want created <= started <= finished <= now, got %d", times[1:])
}

func (p *pod) tryExec(id string, seconds int64, command ...string) (*runtimeapi.ExecSyncResponse, error) {
	return p.Runtime.ExecSync(harness.Limited(p.t), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: command, Timeout: seconds}, grpc.MaxCallRecvMsgSize(16<<20))
}

func (p *pod) execErr(id string, command ...string) error {
	_, err := p.tryExec(id, 0, command...)
	return err
}

// exec runs a script in a container and returns its output; it fails the test unless the script succeeds.
func (p *pod) exec(id, script string) string {
	answer, err := p.tryExec(id, 0, "/bin/sh", "-c", script)
	check(p.t, err)
	expect(p.t, answer.ExitCode == 0, "exec %q ended with %d: %s%s", script, answer.ExitCode, answer.Stdout, answer.Stderr)
	return strings.TrimSpace(string(answer.Stdout))
}

// letEnd makes the file that a program waits for. Its end may take the command along that made it.
func (p *pod) letEnd(id string) { _, _ = p.tryExec(id, 0, "touch", "/enough") }

func (p *pod) logs(id string) (stdout, stderr string) { return p.readLog(p.status(id).LogPath) }

func (p *pod) stdout(id string) string {
	stdout, _ := p.logs(id)
	return stdout
}

func (p *pod) readLog(path string) (stdout, stderr string) {
	var out, err bytes.Buffer
	check(p.t, logs.ReadLogs(harness.Limited(p.t), path, "", &logs.LogOptions{}, nil, &out, &err))
	return out.String(), err.String()
}

func (p *pod) awaitLine(id, line string) {
	harness.Eventually(p.t, fmt.Sprintf("%q is in the log", line), func() bool { return strings.Contains(p.stdout(id), line+"\n") })
}

func (p *pod) awaitExecs(id string) {
	harness.Eventually(p.t, "a supervisor runs commands", func() bool {
		answer, err := p.tryExec(id, 0, "echo", "hi")
		return err == nil && string(answer.Stdout) == "hi\n"
	})
}

// stopPod stops the pod, which stays.
func (p *pod) stopPod() error {
	return nodetest.Err(p.t, p.Runtime.StopPodSandbox, &runtimeapi.StopPodSandboxRequest{PodSandboxId: p.id})
}

func (p *pod) removePod() error {
	return nodetest.Err(p.t, p.Runtime.RemovePodSandbox, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: p.id})
}

func (p *pod) address() string {
	return nodetest.Call(p.t, p.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.id}).Status.Network.GetIp()
}

// pausePID is the process id of the pod's pause; tests of the unit and of AppArmor ask for it.
func (p *pod) pausePID() int {
	answer := nodetest.Call(p.t, p.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.id, Verbose: true})
	var info struct {
		PID int `json:"pid"`
	}
	check(p.t, json.Unmarshal([]byte(answer.Info["info"]), &info))
	return info.PID
}

func (p *pod) killShim() {
	pids := p.Node.Supervisors()
	harness.Need(p.t, len(pids) == 1, "shims: %v", pids)
	check(p.t, unix.Kill(pids[0], unix.SIGKILL))
}

func (p *pod) inCgroup(path string) (commands []string) {
	for _, pid := range p.pidsInCgroup(path) {
		command, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid)) // it may have ended
		commands = append(commands, strings.TrimSpace(string(command)))
	}
	return commands
}

func (p *pod) pidsInCgroup(path string) (pids []int) {
	files := harness.Glob(p.t, "/sys/fs/cgroup/*"+path+"/cgroup.procs")
	for _, file := range append(files, harness.Glob(p.t, "/sys/fs/cgroup"+path+"/cgroup.procs")...) {
		// hack/test-runtimes hides version 2 from crun, which makes files all the same.
		var system unix.Statfs_t
		if unix.Statfs(file, &system) == nil && (system.Type == unix.CGROUP_SUPER_MAGIC || system.Type == unix.CGROUP2_SUPER_MAGIC) {
			data, _ := os.ReadFile(file) // it may be gone by now
			for field := range strings.FieldsSeq(string(data)) {
				pid, _ := strconv.Atoi(field)
				pids = append(pids, pid)
			}
		}
	}
	return pids
}

func namespace(t testing.TB, pid int, kind string) string {
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	check(t, err)
	return name
}

// reload gives the daemon a drop-in of its configuration, which changes it, and waits until it is in force.
func reload(t testing.TB, n *nodetest.Node, keys string) { n.Reload(func() { dropIn(t, n, keys) }) }

func dropIn(t testing.TB, n *nodetest.Node, keys string) {
	dir := filepath.Join(n.Dir, "config.toml.d")
	check(t, os.MkdirAll(dir, 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "test.toml"), []byte(keys), 0o600))
}

// beside makes a call beside the test, and gives its error later.
func beside(call func() error) <-chan error {
	done := make(chan error, 1)
	go func() { done <- call() }()
	return done
}

var check, wantError, wantCode = harness.Check, harness.WantError, nodetest.WantCode

func wantRefused(t testing.TB, err error, fields ...string) {
	wantCode(t, err, codes.InvalidArgument, fields...)
}

// expect fails the test with this text unless it holds.
func expect(t testing.TB, holds bool, text string, values ...any) {
	harness.Want(t, holds, text, values...)
}

// wantFound fails the test unless minicri check finds something, and says all this of it.
func wantFound(t testing.TB, n *nodetest.Node, says ...string) {
	output, err := n.RunCommand("check")
	wantError(t, err)
	for _, text := range says {
		expect(t, strings.Contains(output, text), "check does not say %q:\n%s", text, output)
	}
}

// same fails the test unless two values are the same.
func same[T any](t testing.TB, what string, got, want T) { harness.Same(t, what, got, want) }
