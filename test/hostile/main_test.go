package hostile

import (
	"encoding/json"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
)

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

// serve serves a handler on loopback of the node's network namespace and returns
// its host and port.
func serve(t testing.TB, n *harness.Node, address string, handler http.Handler) string {
	t.Helper()
	listener := n.Listen(address)
	server := &http.Server{Handler: handler, ReadHeaderTimeout: patience}
	go func() { _ = server.Serve(listener) }() // until Close
	t.Cleanup(func() { _ = server.Close() })
	return listener.Addr().String()
}

// newRegistry is a hostile registry that the node reaches at host.
func newRegistry(t testing.TB, n *harness.Node) (content *registry.Registry, host string) {
	t.Helper()
	content = registry.New()
	return content, serve(t, n, "127.0.0.1:0", content)
}

// pull asks the daemon as the kubelet does.
func pull(t testing.TB, n *harness.Node, reference string, auth *runtimeapi.AuthConfig) (id string, err error) {
	t.Helper()
	answer, err := n.Image.PullImage(limited(t), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: reference}, Auth: auth})
	return answer.GetImageRef(), err
}

func run(t testing.TB, n *harness.Node, container string, command ...string) (code int32, output string) {
	t.Helper()
	answer, err := n.Runtime.ExecSync(limited(t), &runtimeapi.ExecSyncRequest{ContainerId: container, Cmd: command, Timeout: 60})
	check(t, err)
	return answer.GetExitCode(), string(answer.GetStdout()) + string(answer.GetStderr())
}

// attackerImage is BusyboxImage with the program of testdata/attacker.c.
const attackerImage = "test.example/attacker:1"

// newAttackedNode makes a node with both images.
func newAttackedNode(t testing.TB, options ...harness.Option) *harness.Node {
	t.Helper()
	program := filepath.Join(t.TempDir(), "attacker")
	if out, err := exec.Command("gcc", "-static", "-O2", "-o", program, "testdata/attacker.c").CombinedOutput(); err != nil {
		t.Fatalf("gcc: %v: %s", err, out)
	}
	content, err := os.ReadFile(program)
	check(t, err)
	n := harness.NewNode(t, options...)
	n.ImportBusybox()
	n.BuildImage(attackerImage, harness.Object{"Env": []string{"PATH=/bin"}}, n.AddBusybox, func(l *harness.Layer) {
		l.File("attacker", 0o755, 0, string(content))
	})
	return n
}

// tenant is a pod of a node, and who has it.
type tenant struct {
	*harness.Node
	t   testing.TB
	pod *runtimeapi.PodSandboxConfig
	id  string
}

func newTenant(t testing.TB, n *harness.Node, name string, options ...harness.PodOption) *tenant {
	t.Helper()
	pod := n.PodConfig(name, options...)
	return &tenant{n, t, pod, n.RunPod(pod)}
}

// change changes a container's configuration.
type change func(*runtimeapi.ContainerConfig)

// powerless is a container without any capability, with the default filter of system
// calls or without one.
func powerless(profile runtimeapi.SecurityProfile_ProfileType) change {
	return func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.Capabilities = &runtimeapi.Capability{DropCapabilities: []string{"ALL"}}
		c.Linux.SecurityContext.Seccomp = &runtimeapi.SecurityProfile{ProfileType: profile}
	}
}

// ofAttacker is a container that does what attacker.c says.
func ofAttacker(args ...string) change {
	return func(c *runtimeapi.ContainerConfig) {
		c.Image.Image, c.Command = attackerImage, append([]string{"/attacker"}, args...)
	}
}

func pidNamespace(mode runtimeapi.NamespaceMode, target string) change {
	return func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{Pid: mode, TargetId: target}
	}
}

func (p *tenant) create(name string, changes ...change) (id string, err error) {
	config := harness.Container(name, "sleep", "1000000")
	for _, apply := range changes {
		apply(config)
	}
	return p.CreateContainer(p.id, p.pod, config)
}

func (p *tenant) start(id string) error {
	_, err := p.Runtime.StartContainer(limited(p.t), &runtimeapi.StartContainerRequest{ContainerId: id})
	return err
}

func (p *tenant) stop(id string) error {
	_, err := p.Runtime.StopContainer(limited(p.t), &runtimeapi.StopContainerRequest{ContainerId: id})
	return err
}

func (p *tenant) remove(id string) error {
	_, err := p.Runtime.RemoveContainer(limited(p.t), &runtimeapi.RemoveContainerRequest{ContainerId: id})
	return err
}

func (p *tenant) run(name string, changes ...change) (id string) {
	p.t.Helper()
	id, err := p.create(name, changes...)
	check(p.t, err)
	check(p.t, p.start(id))
	return id
}

func (p *tenant) exec(id string, seconds int64, command ...string) (*runtimeapi.ExecSyncResponse, error) {
	return p.Runtime.ExecSync(limited(p.t), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: command, Timeout: seconds})
}

// facts are what the verbose status says of a container.
type facts struct {
	PID         int    `json:"pid"`
	CgroupsPath string `json:"cgroupsPath"`
}

func (p *tenant) facts(id string) (f facts) {
	p.t.Helper()
	answer, err := p.Runtime.ContainerStatus(limited(p.t), &runtimeapi.ContainerStatusRequest{ContainerId: id, Verbose: true})
	check(p.t, err)
	check(p.t, json.Unmarshal([]byte(answer.GetInfo()["info"]), &f))
	f.CgroupsPath = cgroup.Path(f.CgroupsPath)
	return f
}

// log is what a container has written to its log, as it is in the file.
func (p *tenant) log(name string) string {
	content, _ := os.ReadFile(filepath.Join(p.pod.GetLogDirectory(), name+".log"))
	return string(content)
}

func (p *tenant) awaitLog(name, text string) {
	p.t.Helper()
	harness.Eventually(p.t, name+" writes "+text, patience, func() bool { return strings.Contains(p.log(name), text) })
}

// supervisors are the processes that the node's pods depend on.
func supervisors(n *harness.Node) []int {
	return slices.Sorted(slices.Values(n.Supervisors()))
}

// holdings are what supervisors have of what an exec may leave.
type holdings struct{ descriptors, threads, children int }

// held is what supervisors have at the quietest of several moments: other pods come
// and go.
func held(t testing.TB, pids []int) (least holdings) {
	t.Helper()
	for try := range 11 {
		var now holdings
		for _, pid := range pids {
			open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
			check(t, err)
			threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
			check(t, err)
			now.descriptors, now.threads = now.descriptors+len(open), now.threads+len(threads)
		}
		for _, p := range processes() {
			if slices.Contains(pids, p.parent) {
				now.children++
			}
		}
		if try == 0 {
			least = now
		}
		least = holdings{min(least.descriptors, now.descriptors), min(least.threads, now.threads), min(least.children, now.children)}
		time.Sleep(30 * time.Millisecond)
	}
	return least
}

// process is one of /proc.
type process struct {
	pid, parent int
	state       string
	args        []string
}

// processes are those of the test's pid namespace.
func processes() (all []process) {
	stats, _ := filepath.Glob("/proc/[0-9]*/stat")
	for _, path := range stats {
		stat, _ := os.ReadFile(path) // it may have ended
		_, rest, _ := strings.Cut(string(stat), ") ")
		fields := strings.Fields(rest)
		if len(fields) < 2 {
			continue
		}
		line, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "cmdline"))
		p := process{state: fields[0], args: strings.Split(string(line), "\x00")}
		p.pid, _ = strconv.Atoi(filepath.Base(filepath.Dir(path)))
		p.parent, _ = strconv.Atoi(fields[1])
		all = append(all, p)
	}
	return all
}

func pidNamespaceOf(pid int) string {
	link, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid)) // it may have ended
	return link
}

// stoppedIn are the processes of a pid namespace that a signal has stopped.
func stoppedIn(namespace string) (pids []int) {
	for _, p := range processes() {
		if p.state == "T" && pidNamespaceOf(p.pid) == namespace {
			pids = append(pids, p.pid)
		}
	}
	return pids
}

// releaseStopped kills, at the test's end, what an attacker has stopped in the pid
// namespace of a process: where the attack succeeds, nobody else can.
func releaseStopped(t testing.TB, of int) {
	t.Helper()
	theirs := pidNamespaceOf(of)
	if theirs == "" || theirs == pidNamespaceOf(os.Getpid()) {
		t.Fatalf("process %d is in no pid namespace of its own", of)
	}
	t.Cleanup(func() {
		for began := time.Now(); time.Since(began) < time.Second; time.Sleep(10 * time.Millisecond) {
			for _, pid := range stoppedIn(theirs) {
				_ = unix.Kill(pid, unix.SIGKILL) // it may have ended
			}
		}
	})
}
