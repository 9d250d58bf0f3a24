// Package hostile attacks a node as tenants, images, registries and the machine's local users could: the real
// daemon, with content that was made to harm it.
//
// A test that is an attack says so in its comment, in lines that begin with "attack:" (a subject, and what is tried),
// "held:" (how it ends here) and "field:" (what other runtimes do, where that is known). docs/security.md is made
// from these lines, of all packages; TestSecurityPageIsCurrent, at the top of the repository, holds it to them.
package hostile

import (
	"encoding/json"
	"errors"
	"fmt"
	"net/http"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/hostile/registry"
	"github.com/minicri/minicri/test/nodetest"
)

func TestMain(m *testing.M) { os.Exit(nodetest.Main(m)) }

func newNode(t testing.TB, options ...nodetest.Option) *nodetest.Node {
	n := nodetest.New(t, options...)
	n.ImportBusybox()
	return n
}

// newRegistryNode makes a node with a hostile registry, which it reaches at host.
func newRegistryNode(t testing.TB) (n *nodetest.Node, content *registry.Registry, host string) {
	n, content = newNode(t), registry.New()
	listener := n.Listen("127.0.0.1:0")
	server := &http.Server{Handler: content, ReadHeaderTimeout: time.Minute}
	go func() { _ = server.Serve(listener) }() // until Close
	t.Cleanup(func() { _ = server.Close() })
	return n, content, listener.Addr().String()
}

// pull asks the daemon as the kubelet does.
func pull(t testing.TB, n *nodetest.Node, reference string, auth *runtimeapi.AuthConfig) (id string, err error) {
	answer, err := n.Image.PullImage(harness.Limited(t), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: reference}, Auth: auth})
	return answer.GetImageRef(), err
}

func run(t testing.TB, n *nodetest.Node, container string, command ...string) (code int32, output string) {
	answer := nodetest.Call(t, n.Runtime.ExecSync, &runtimeapi.ExecSyncRequest{ContainerId: container, Cmd: command, Timeout: 60})
	return answer.GetExitCode(), string(answer.GetStdout()) + string(answer.GetStderr())
}

// attackerImage is BusyboxImage with the program of testdata/attacker.c.
const attackerImage = "test.example/attacker:1"

// newAttackedNode makes a node with both images.
func newAttackedNode(t testing.TB, options ...nodetest.Option) *nodetest.Node {
	program := filepath.Join(t.TempDir(), "attacker")
	out, err := exec.Command("gcc", "-static", "-O2", "-o", program, "testdata/attacker.c").CombinedOutput()
	harness.Need(t, err == nil, "gcc: %v: %s", err, out)
	content := harness.Read(t, program)
	n := newNode(t, options...)
	n.BuildImage(attackerImage, nodetest.Object{"Env": []string{"PATH=/bin"}}, n.AddBusybox, func(l *nodetest.Layer) {
		l.File("attacker", 0o755, 0, string(content))
	})
	return n
}

// tenant is a pod of a node, and who has it.
type tenant struct {
	*nodetest.Node
	t   testing.TB
	pod *runtimeapi.PodSandboxConfig
	id  string
}

func newTenant(t testing.TB, n *nodetest.Node, name string, options ...nodetest.PodOption) *tenant {
	pod := n.PodConfig(name, options...)
	return &tenant{n, t, pod, n.RunPod(pod)}
}

// change changes a container's configuration.
type change func(*runtimeapi.ContainerConfig)

// powerless is a container without any capability, with the default filter of system calls or without one.
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

// outOfAppArmor lets a container signal what is about to become another: the runtime's profile does not.
func outOfAppArmor(c *runtimeapi.ContainerConfig) {
	c.Linux.SecurityContext.Apparmor = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}
}

func pidNamespace(mode runtimeapi.NamespaceMode, target string) change {
	return func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{Pid: mode, TargetId: target}
	}
}

func (p *tenant) create(name string, changes ...change) (id string, err error) {
	config := nodetest.Container(name, "sleep", "1000000")
	for _, apply := range changes {
		apply(config)
	}
	return p.CreateContainer(p.id, p.pod, config)
}

func (p *tenant) start(id string) error {
	return nodetest.Err(p.t, p.Runtime.StartContainer, &runtimeapi.StartContainerRequest{ContainerId: id})
}

func (p *tenant) stop(id string) error {
	return nodetest.Err(p.t, p.Runtime.StopContainer, &runtimeapi.StopContainerRequest{ContainerId: id})
}

func (p *tenant) remove(id string) error {
	return nodetest.Err(p.t, p.Runtime.RemoveContainer, &runtimeapi.RemoveContainerRequest{ContainerId: id})
}

func (p *tenant) run(name string, changes ...change) (id string) {
	id, err := p.create(name, changes...)
	check(p.t, err)
	check(p.t, p.start(id))
	return id
}

func (p *tenant) exec(id string, seconds int64, command ...string) (*runtimeapi.ExecSyncResponse, error) {
	return p.Runtime.ExecSync(harness.Limited(p.t), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: command, Timeout: seconds})
}

// facts are what the verbose status says of a container.
type facts struct {
	PID         int    `json:"pid"`
	CgroupsPath string `json:"cgroupsPath"`
}

func (p *tenant) facts(id string) (f facts) {
	answer := nodetest.Call(p.t, p.Runtime.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: id, Verbose: true})
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
	harness.Eventually(p.t, name+" writes "+text, func() bool { return strings.Contains(p.log(name), text) })
}

// holdings are what supervisors have of what an exec may leave.
type holdings struct{ descriptors, threads, children int }

// held is what supervisors have.
func held(t testing.TB, pids []int) (now holdings) {
	for _, pid := range pids {
		open, err := os.ReadDir(fmt.Sprintf("/proc/%d/fd", pid))
		check(t, err)
		threads, err := os.ReadDir(fmt.Sprintf("/proc/%d/task", pid))
		check(t, err)
		now.descriptors, now.threads = now.descriptors+len(open), now.threads+len(threads)
	}
	for _, p := range harness.Processes() {
		if slices.Contains(pids, p.Parent) {
			now.children++
		}
	}
	return now
}

func pidNamespaceOf(pid int) string {
	link, _ := os.Readlink(fmt.Sprintf("/proc/%d/ns/pid", pid)) // it may have ended
	return link
}

// stoppedIn are the processes of a pid namespace that a signal has stopped.
func stoppedIn(namespace string) (pids []int) {
	for _, p := range harness.Processes() {
		if p.State == 'T' && pidNamespaceOf(p.PID) == namespace {
			pids = append(pids, p.PID)
		}
	}
	return pids
}

// releaseStopped kills, at the test's end, what an attacker has stopped in the pid namespace of a process:
// where the attack succeeds, nobody else can.
func releaseStopped(t testing.TB, of int) {
	theirs := pidNamespaceOf(of)
	harness.Need(t, theirs != "" && theirs != pidNamespaceOf(os.Getpid()), "process %d is in no pid namespace of its own", of)
	t.Cleanup(func() {
		for _, pid := range stoppedIn(theirs) {
			_ = unix.Kill(pid, unix.SIGKILL) // it may have ended
		}
	})
}

// moreThreads is what Go's scheduler may start of its own accord.
const moreThreads = 8

// neighbour is the pod of another tenant: things happen in it that no attack may delay.
type neighbour struct {
	*tenant
	witness string
	number  int
}

func newNeighbour(t testing.TB, n *nodetest.Node) *neighbour {
	p := &neighbour{tenant: newTenant(t, n, "neighbour")}
	p.witness = p.run("witness")
	p.run("writes", command("/bin/sh", "-c", "while sleep 0.05; do echo line; done"))
	p.awaitLog("writes", "line")
	return p
}

func command(words ...string) change {
	return func(c *runtimeapi.ContainerConfig) { c.Command = words }
}

// rounds is how often each call is made beside an attack.
const rounds = 5

// calls makes execs, containers, lines of a log and ends of containers. Each has to succeed.
func (p *neighbour) calls() {
	for range rounds {
		_, err := p.exec(p.witness, 0, "true")
		check(p.t, err)
		p.number++
		id := p.run(fmt.Sprint("short", p.number))
		size := len(p.log("writes"))
		harness.Eventually(p.t, "another line comes", func() bool { return len(p.log("writes")) > size })
		check(p.t, errors.Join(p.stop(id), p.remove(id)))
	}
}

// besides makes an attack. Once it is in force, and holds something up that only its end releases, it calls others:
// then execs, starts, stops and logs of another pod have to come to their end all the same. After the attack no
// supervisor has ended, and nothing of it is left.
func besides(t *testing.T, n *nodetest.Node, attack func(others func())) {
	t.Helper()
	p := newNeighbour(t, n)
	p.calls()
	pids := n.Supervisors()
	node, own := n.Look(), held(t, pids)
	called := false
	attack(func() {
		p.calls()
		called = true
	})
	harness.Need(t, called, "nothing was done beside the attack: this shows nothing")
	harness.Same(t, "the supervisors", n.Supervisors(), pids)
	wantNothingLeft(t, n, pids, own)
	for _, left := range n.Differences(node) {
		t.Error(left)
	}
}

// wantNothingLeft waits until supervisors have what they had before.
func wantNothingLeft(t testing.TB, n *nodetest.Node, pids []int, before holdings) {
	t.Helper()
	harness.Eventually(t, fmt.Sprintf("supervisors have no more than %+v", before), func() bool {
		after := held(t, pids)
		return after.descriptors <= before.descriptors && after.children <= before.children && after.threads <= before.threads+moreThreads
	})
}
