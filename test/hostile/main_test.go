// Package hostile attacks a node as tenants, images, registries and the machine's local users could: the real
// daemon, with content that was made to harm it.
//
// A test that is an attack says so in its comment, in lines that begin with "attack:" (a subject, and what is tried),
// "held:" (how it ends here) and "field:" (what other runtimes do, where that is known). docs/security.md is made
// from these lines, of all packages; TestSecurityPageIsCurrent, at the top of the repository, holds it to them.
package hostile

import (
	"bytes"
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
	server := &http.Server{Handler: content, ReadHeaderTimeout: patience}
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

// held is what supervisors have at the quietest of several moments: other pods come and go.
func held(t testing.TB, pids []int) (least holdings) {
	for try := range 11 {
		var now holdings
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
		if try == 0 {
			least = now
		}
		least = holdings{min(least.descriptors, now.descriptors), min(least.threads, now.threads), min(least.children, now.children)}
		time.Sleep(30 * time.Millisecond)
	}
	return least
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
		for began := time.Now(); time.Since(began) < time.Second; time.Sleep(10 * time.Millisecond) {
			for _, pid := range stoppedIn(theirs) {
				_ = unix.Kill(pid, unix.SIGKILL) // it may have ended
			}
		}
	})
}

const (
	// reference is how long is looked before an attack for what is usual.
	reference = 4 * time.Second
	// mostLonger is how much longer than usual another pod's calls may take in one.
	mostLonger = 2 * time.Second
	// tact is how often something happens in the other pod.
	tact = 100 * time.Millisecond
	// moreThreads is what Go's scheduler may start of its own accord.
	moreThreads = 8
)

// neighbour is the pod of another tenant: things happen in it that no attack may delay.
type neighbour struct {
	*tenant
	witness, made string
	number        int
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

// calls are made in turn, each by its name.
func (p *neighbour) calls() (names []string, calls []func() error) {
	return []string{"exec", "create and start", "log line", "stop and remove"}, []func() error{
		func() error { _, err := p.exec(p.witness, 0, "true"); return err },
		func() (err error) {
			p.number++
			if p.made, err = p.create(fmt.Sprint("short", p.number)); err == nil {
				err = p.start(p.made)
			}
			return err
		},
		func() error {
			size := len(p.log("writes"))
			for began := time.Now(); len(p.log("writes")) == size; time.Sleep(time.Millisecond) {
				if time.Since(began) > patience {
					return fmt.Errorf("no line within %v", patience)
				}
			}
			return nil
		},
		func() error { return errors.Join(p.stop(p.made), p.remove(p.made)) },
	}
}

// watch makes calls, one after the other, until it is told to end, and says how long the slowest of each kind
// took. After one that fails there is nothing to learn.
func (p *neighbour) watch(end <-chan struct{}) (slowest map[string]time.Duration) {
	slowest = make(map[string]time.Duration)
	names, calls := p.calls()
	ticks := time.NewTicker(tact)
	defer ticks.Stop()
	for ended := false; ; {
		for i, call := range calls {
			began := time.Now()
			err := call()
			slowest[names[i]] = max(slowest[names[i]], time.Since(began))
			if err != nil {
				p.t.Errorf("%s in another pod, after %v: %v", names[i], time.Since(began), err)
				return slowest
			}
			select {
			case <-ticks.C:
			case <-end:
				ended = true
			}
		}
		if ended {
			return slowest
		}
	}
}

// usual is watch for a while in which nothing is attacked.
func (p *neighbour) usual(while time.Duration) map[string]time.Duration {
	end := make(chan struct{})
	time.AfterFunc(while, func() { close(end) })
	return p.watch(end)
}

// besides makes an attack while things happen in another pod, and fails the test if that delays them, costs a
// supervisor its life or leaves anything with it. target is what is attacked, and stays.
func besides(t *testing.T, n *nodetest.Node, attack func()) {
	t.Helper()
	p := newNeighbour(t, n)
	usual := p.usual(reference)
	harness.Need(t, !t.Failed(), "this failed before the attack")
	pids := n.Supervisors()
	node, own := n.Look(), held(t, pids)

	began, end, watched := time.Now(), make(chan struct{}), make(chan map[string]time.Duration, 1)
	go func() { watched <- p.watch(end) }()
	func() {
		defer close(end)
		attack()
	}()
	slowest, lasted := <-watched, time.Since(began)
	beside := time.Duration(1)
	if bytes.Contains(harness.Read(t, "/proc/cpuinfo"), []byte("User Mode Linux")) {
		beside = 4 // there each system call takes longer beside any work, an attack or not
	}
	slow := func(name string) bool { return slowest[name] > beside*usual[name]+mostLonger }
	for name := range slowest {
		if slow(name) {
			// Perhaps the machine is busier than it was before, or one in many calls is slow: what is usual now, in as
			// long a time?
			for name, took := range p.usual(max(lasted, reference)) {
				usual[name] = max(usual[name], took)
			}
			break
		}
	}
	for name, took := range slowest {
		t.Logf("%s in another pod: at most %v, %v without the attack", name, took, usual[name])
		harness.Want(t, !slow(name), "%s in another pod took %v, %v without the attack", name, took, usual[name])
	}
	harness.Same(t, "the supervisors", n.Supervisors(), pids)
	if !t.Failed() {
		wantNothingLeft(t, n, pids, own)
		for _, left := range n.Differences(node) {
			t.Error(left)
		}
	}
}

// wantNothingLeft waits until supervisors have what they had before.
func wantNothingLeft(t testing.TB, n *nodetest.Node, pids []int, before holdings) {
	t.Helper()
	after := held(t, pids)
	for began := time.Now(); (after.descriptors > before.descriptors || after.children > before.children) && time.Since(began) < patience/2; {
		after = held(t, pids)
	}
	t.Logf("of the supervisor: before %+v, after %+v", before, after)
	harness.Want(t, after.descriptors <= before.descriptors && after.children <= before.children && after.threads <= before.threads+moreThreads,
		"the supervisor has %+v, before the attack %+v", after, before)
}
