package nri

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/test/harness"
)

// none is a node without pods and containers.
type (
	none     struct{}
	nonePods struct{}
)

func (nonePods) List() []*sandbox.Sandbox                   { return nil }
func (nonePods) NetnsPath(*sandbox.Sandbox) string          { return "" }
func (nonePods) UsernsPath(*sandbox.Sandbox) string         { return "" }
func (none) List() []*container.Container                   { return nil }
func (none) Spec(*container.Container) (*specs.Spec, error) { return &specs.Spec{}, nil }
func (none) UpdateUnsolicited(context.Context, string, *runtimeapi.LinuxContainerResources) error {
	return nil
}

// unmeasured are metrics that nobody looks at.
type unmeasured struct{}

func (unmeasured) NRIRequest(string, string, string)        {}
func (unmeasured) NRILatency(string, string, time.Duration) {}
func (unmeasured) NRIPlugins(int)                           {}

// idle is a plugin that does nothing about pods and containers.
type idle struct{}

func (idle) RunPodSandbox(context.Context, *api.PodSandbox) error { return nil }

func (idle) CreateContainer(context.Context, *api.PodSandbox, *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	return nil, nil, nil
}

// newPlugins are those of a directory, which are not started yet.
func newPlugins(t *testing.T, dir string, registration, request time.Duration) *Plugins {
	p := New(Options{
		Source:       Source{Enabled: true, Socket: filepath.Join(dir, "s"), PluginDir: dir, ConfigDir: dir},
		Registration: registration, Request: request,
		State: t.TempDir(), Version: "test", Metrics: unmeasured{}, Logger: slog.New(slog.DiscardHandler),
	})
	t.Cleanup(p.Close)
	return p
}

func open(t *testing.T, limit time.Duration) (p *Plugins, socket string) {
	dir := t.TempDir()
	p = newPlugins(t, dir, time.Minute, limit)
	harness.Check(t, p.Open(nonePods{}, none{}))
	return p, filepath.Join(dir, "s")
}

func (p *Plugins) run(ctx context.Context, name string) error {
	return p.notify(ctx, func(a *adaptation.Adaptation) error {
		return a.RunPodSandbox(ctx, &adaptation.RunPodSandboxRequest{Pod: &api.PodSandbox{Name: name}})
	})
}

// A socket of another runtime, which NRI's fixed path makes likely, does not fail the start. The plugins of the
// directory take part, the problem has its cure, and a reload listens once the socket is free.
func TestSocketOfAnotherRuntime(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "s")
	other, err := net.Listen("unix", path)
	harness.Check(t, err)
	p := newPlugins(t, dir, time.Minute, time.Minute)
	harness.Check(t, p.Open(nonePods{}, none{}))
	harness.Want(t, p.Enabled(), "NRI is off")
	harness.WantError(t, errors.Join(p.Problems(nil)...), path, "stop the runtime that uses it", "SIGHUP")
	harness.Check(t, other.Close())
	harness.Check(t, p.Reconfigure(p.options))
	harness.Want(t, len(p.Problems(nil)) == 0, "problems are left: %v", p.Problems(nil))
	connectExternal(t, p, path, "10", idle{})
}

// refuser fails requests about the pods with the name that it has.
type refuser struct{ pod string }

func (r refuser) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	if pod.GetName() == r.pod {
		return errors.New("not wanted")
	}
	return nil
}

// Each error has the name of the plugin whose it is, also when others say the same at the same time.
func TestErrorsAreNamed(t *testing.T) {
	p, socket := open(t, time.Minute)
	connectExternal(t, p, socket, "10", refuser{"first"})
	connectExternal(t, p, socket, "20", refuser{"second"})
	var wait sync.WaitGroup
	for range 200 {
		for pod, want := range harness.Sorted(map[string]string{"first": "NRI plugin 10-slow: ", "second": "NRI plugin 20-slow: "}) {
			wait.Go(func() {
				err := p.run(t.Context(), pod)
				harness.Want(t, err != nil && strings.HasPrefix(err.Error(), want), "want an error of %q, got %v", want, err)
			})
		}
	}
	wait.Wait()
}

// A plugin's adjustments are in the spec, those that the library's generator leaves out, too.
func TestAdjustedSpec(t *testing.T) {
	wanted := &api.ContainerAdjustment{}
	err := protojson.Unmarshal([]byte(`{
		"annotations": {"a": "new", "-b": ""}, "env": [{"key": "A", "value": "new"}, {"key": "-B"}, {"key": "C", "value": "1"}],
		"mounts": [{"destination": "-/gone"}, {"destination": "/new", "type": "tmpfs"}],
		"linux": {
			"sysctl": {"kernel.a": "1", "-kernel.b": ""}, "namespaces": [{"type": "-ipc"}, {"type": "network", "path": "/n"}],
			"netDevices": {"eth7": {"name": "eth0"}}, "ioPriority": {"class": "IOPRIO_CLASS_BE", "priority": 3},
			"scheduler": {"policy": "SCHED_BATCH"}, "rdt": {"closId": {"value": "gold"}},
			"resources": {"memory": {"limit": {"value": "10"}, "swap": {"value": "30"}, "reservation": {"value": "5"}, "swappiness": {"value": "7"}},
				"hugepageLimits": [{"pageSize": "2MB", "limit": "4"}], "unified": {"memory.high": "9"}}}}`), wanted)
	harness.Check(t, err)
	spec := &specs.Spec{
		Annotations: map[string]string{"a": "old", "b": "old"}, Process: &specs.Process{Env: []string{"A=old", "B=old"}},
		Mounts: []specs.Mount{{Destination: "/gone"}, {Destination: "/kept"}},
		Linux: &specs.Linux{
			Sysctl: map[string]string{"kernel.b": "1"}, Namespaces: []specs.LinuxNamespace{{Type: "ipc"}, {Type: "network"}, {Type: "mount"}},
		},
	}
	harness.Check(t, adjust(spec, wanted, nil))
	limit, swap, reservation, swappiness := int64(10), int64(30), int64(5), uint64(7)
	want := &specs.Spec{
		Annotations: map[string]string{"a": "new"}, Process: &specs.Process{
			Env: []string{"A=new", "C=1"}, IOPriority: &specs.LinuxIOPriority{Class: "IOPRIO_CLASS_BE", Priority: 3}, Scheduler: spec.Process.Scheduler,
		},
		Mounts: []specs.Mount{{Destination: "/kept"}, {Destination: "/new", Type: "tmpfs", Options: spec.Mounts[1].Options}},
		Linux: &specs.Linux{
			Sysctl: map[string]string{"kernel.a": "1"}, Namespaces: []specs.LinuxNamespace{{Type: "network", Path: "/n"}, {Type: "mount"}},
			NetDevices: map[string]specs.LinuxNetDevice{"eth7": {Name: "eth0"}}, IntelRdt: &specs.LinuxIntelRdt{ClosID: "gold"},
			Resources: &specs.LinuxResources{
				Memory:         &specs.LinuxMemory{Limit: &limit, Swap: &swap, Reservation: &reservation, Swappiness: &swappiness},
				HugepageLimits: []specs.LinuxHugepageLimit{{Pagesize: "2MB", Limit: 4}}, Unified: map[string]string{"memory.high": "9"},
			},
		},
	}
	harness.Want(t, spec.Process.Scheduler != nil && spec.Process.Scheduler.Policy == specs.SchedBatch,
		"scheduler %+v", spec.Process.Scheduler)
	harness.Same(t, "the spec", spec, want)
}

// The name is what the user wrote, the digest that of the reference.
func TestImage(t *testing.T) {
	const id, digest = "sha256:1", "sha256:2"
	for _, test := range []struct {
		image             *runtimeapi.ImageSpec
		reference, target string
		want              *api.Image
	}{
		{&runtimeapi.ImageSpec{Image: id, UserSpecifiedImage: "r.test/bb:1"}, "r.test/bb@" + digest, "sha256:3", &api.Image{Name: "r.test/bb:1", Digest: digest, ConfigDigest: id}},
		{&runtimeapi.ImageSpec{Image: "r.test/bb:1"}, id, digest, &api.Image{Name: "r.test/bb:1", Digest: digest, ConfigDigest: id}}, // imported
	} {
		got := imageOf(test.image, test.reference, test.target, id)
		harness.Want(t, got.String() == test.want.String(), "got %v, want %v", got, test.want)
	}
}

// external is a plugin that connects by itself, and says when its connection ends.
type external struct {
	stub.Stub
	ended chan struct{}
}

func connectExternal(t *testing.T, p *Plugins, socket, index string, plugin any) external {
	e := external{ended: make(chan struct{})}
	var err error
	e.Stub, err = stub.New(plugin, stub.WithSocketPath(socket), stub.WithPluginName("slow"), stub.WithPluginIdx(index), stub.WithOnClose(sync.OnceFunc(func() { close(e.ended) })))
	harness.Check(t, err)
	harness.Check(t, e.Start(t.Context()))
	t.Cleanup(e.Stop)
	awaitThat(t, "the plugin is connected", func() bool { return slices.Contains(p.Connected(), index+"-slow") })
	return e
}

func awaitThat(t *testing.T, what string, is func() bool) {
	harness.Eventually(t, what, is)
}

func (e external) awaitEnd(t *testing.T) {
	t.Helper()
	<-e.ended
}

// NRI switched off, or over to another directory, disconnects plugins that have connected by themselves: nothing of
// them is left, and what they want is refused. Those that are not back are named. The library's own socket takes none.
func TestSwitchedOffIsOff(t *testing.T) {
	p, socket := open(t, time.Minute)
	none, err := net.Dial("unix", socket) // it registers nothing
	harness.Check(t, err)
	_, err = none.Write([]byte("none"))
	harness.Check(t, errors.Join(err, none.Close()))
	d := p.door.Load()
	awaitThat(t, "it has left", func() bool { d.mu.Lock(); defer d.mu.Unlock(); return d.current != nil && len(d.links) == 0 })
	stranger, err := stub.New(idle{}, stub.WithSocketPath(d.library), stub.WithPluginName("slow"), stub.WithPluginIdx("10"))
	harness.Check(t, err)
	harness.WantError(t, stranger.Start(t.Context()), "plugins connect to nri.socket")
	off, elsewhere := p.options, p.options
	off.Enabled = false
	elsewhere.PluginDir = t.TempDir()
	switchOver := func(options Options) { harness.Check(t, p.Reconfigure(options)) }
	cycle := func() {
		plugin := connectExternal(t, p, socket, "10", idle{})
		switchOver(off)
		plugin.awaitEnd(t)
		switchOver(p.options)
		problems := fmt.Sprint(p.Problems(p.Connected()))
		harness.Want(t, strings.Contains(problems, "10-slow"), "a plugin that is not back is no problem: %s", problems)
		again := connectExternal(t, p, socket, "10", idle{})
		harness.Same(t, "the plugin is back", p.Problems(p.Connected()), nil)
		switchOver(elsewhere)
		again.awaitEnd(t)
		_, err := again.UpdateContainers([]*api.ContainerUpdate{{ContainerId: "c"}})
		harness.Want(t, err != nil, "a plugin that was disconnected has updated a container")
		switchOver(off)
	}
	cycle()
	goroutines, files := runtime.NumGoroutine(), descriptors(t)
	for range 5 {
		switchOver(p.options)
		cycle()
	}
	awaitThat(t, "no goroutine and no descriptor is left", func() bool {
		return runtime.NumGoroutine() <= goroutines && descriptors(t) <= files
	})
}

func descriptors(t *testing.T) int {
	files, err := os.ReadDir("/proc/self/fd")
	harness.Check(t, err)
	return len(files)
}

// Plugins that do not register are waited for side by side, and end with what they have started, in sessions of its
// own too.
func TestMutePlugins(t *testing.T) {
	const many = 4
	lines := func(path string) []string {
		content, _ := os.ReadFile(path) // it may not be there
		return strings.Fields(string(content))
	}
	for registration, met := time.Second, 0; met < many; registration *= 3 { // a busy machine starts them late
		dir := t.TempDir()
		script := fmt.Sprintf(`#!/bin/sh
cd %s
echo $$ >>plugins
sleep 1000 &
echo $! >>children
setsid sh -c 'echo $$ >>children; exec sleep 1000' &
while [ $(wc -l <plugins) -lt %d ]; do sleep 0.01; done
echo met >>met
wait
`, dir, many)
		for i := range many {
			harness.Check(t, os.WriteFile(filepath.Join(dir, fmt.Sprintf("1%d-mute", i)), []byte(script), 0o700))
		}
		p := newPlugins(t, dir, registration, time.Minute)
		harness.Check(t, p.Open(nonePods{}, none{}))
		harness.Same(t, "problems", len(p.Problems(p.Connected())), many)
		for _, child := range lines(filepath.Join(dir, "children")) {
			pid, err := strconv.Atoi(child)
			harness.Check(t, err)
			awaitThat(t, "what a plugin has started is ended", func() bool { return gone(pid) })
		}
		met = len(lines(filepath.Join(dir, "met")))
	}
}

// The first process of a plugin ends, and a descendant in a session of its own holds the
// connection. Until that ends the pid stays taken, also if orphans are reaped: no other
// process is killed for it, and what is left in its process group is.
func TestPIDOfAPluginThatHasEnded(t *testing.T) {
	harness.Check(t, process.Adopt())
	ctx, stop := context.WithCancel(t.Context())
	var wait sync.WaitGroup
	wait.Go(func() { process.ReapOrphans(ctx, nil) })
	defer wait.Wait()
	defer stop()
	dir := t.TempDir()
	pids := filepath.Join(dir, "pids")
	script := fmt.Sprintf("#!/bin/sh\nsetsid sleep 1000 &\nholder=$!\nsleep 1000 3>&- &\necho $$ $holder $! >%[1]s.new\nmv %[1]s.new %[1]s\n", pids)
	harness.Check(t, os.WriteFile(filepath.Join(dir, "10-ends"), []byte(script), 0o700))
	p := newPlugins(t, dir, time.Minute, time.Minute)
	opened := make(chan error, 1)
	go func() { opened <- p.Open(nonePods{}, none{}) }()
	var first, holder, member int
	awaitThat(t, "the plugin has written its pids", func() bool {
		content, _ := os.ReadFile(pids)
		n, _ := fmt.Sscan(string(content), &first, &holder, &member)
		return n == 3 && gone(first)
	})
	orphan, err := exec.Command("sh", "-c", "sleep 0 >/dev/null & echo $!").Output()
	harness.Check(t, err)
	pid, err := strconv.Atoi(strings.TrimSpace(string(orphan)))
	harness.Check(t, err)
	awaitThat(t, "an orphan that has ended later is reaped", func() bool {
		_, err := process.ReadStat(pid)
		return errors.Is(err, process.ErrGone)
	})
	stat, err := process.ReadStat(first)
	harness.Want(t, err == nil && stat.Parent == os.Getpid(), "the pid of the plugin may be another process's: %+v, %v", stat, err)
	harness.Check(t, unix.Kill(holder, unix.SIGKILL))
	awaitThat(t, "what is left in the plugin's group is ended", func() bool { return gone(member) })
	awaitThat(t, "the plugin is reaped", func() bool {
		_, err := process.ReadStat(first)
		return errors.Is(err, process.ErrGone)
	})
	harness.Check(t, <-opened)
}

// gone reports whether a process has ended; as an orphan it may not be reaped yet.
func gone(pid int) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	return errors.Is(err, os.ErrNotExist) || errors.Is(err, unix.ESRCH) || strings.Contains(string(stat), ") Z ")
}

// A request waits for a plugin that is synchronized no longer than its caller does.
func TestWaitForASynchronization(t *testing.T) {
	p, socket := open(t, time.Minute)
	plugin := late{begun: make(chan time.Time, 1), answer: make(chan struct{})}
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		connectExternal(t, p, socket, "10", plugin)
	}()
	<-plugin.begun
	ctx, cancel := context.WithCancelCause(t.Context())
	left := errors.New("the caller has left")
	cancel(left)
	err := p.run(ctx, "pod")
	harness.Want(t, errors.Is(err, left), "the request ended with %v", err)
	close(plugin.answer)
	<-ended
}

// late is a plugin whose synchronization takes until it is told to answer. It notes when that must end.
type late struct {
	begun  chan time.Time
	answer chan struct{}
	seen   chan string
}

func (l late) Synchronize(ctx context.Context, _ []*api.PodSandbox, _ []*api.Container) ([]*api.ContainerUpdate, error) {
	deadline, _ := ctx.Deadline()
	l.begun <- deadline
	<-l.answer
	return nil, nil
}

func (l late) RunPodSandbox(_ context.Context, pod *api.PodSandbox) error {
	l.seen <- pod.GetName()
	return nil
}

// What is made while a plugin joins is seen by it, also if it takes longer for that than it may for another answer.
func TestMadeWhileAPluginJoins(t *testing.T) {
	const limit = time.Hour
	dir := t.TempDir()
	p, socket := newPlugins(t, dir, 24*time.Hour, limit), filepath.Join(dir, "s")
	harness.Check(t, p.Open(nonePods{}, none{}))
	l := late{begun: make(chan time.Time), answer: make(chan struct{}), seen: make(chan string, 10)}
	s, err := stub.New(l, stub.WithSocketPath(socket), stub.WithPluginName("slow"), stub.WithPluginIdx("10"), stub.WithOnClose(func() {}))
	harness.Check(t, err)
	harness.Check(t, s.Start(t.Context()))
	defer s.Stop()
	deadline := <-l.begun
	harness.Want(t, time.Until(deadline) > limit, "it has to join within %v", time.Until(deadline))
	const many = 3
	var wait sync.WaitGroup
	for i := range many {
		wait.Go(func() { harness.Same(t, "an error", p.run(t.Context(), fmt.Sprint(i)), nil) })
	}
	close(l.answer)
	wait.Wait()
	harness.Want(t, len(l.seen) == many, "of %d pods that were made while it was synchronized, the plugin has seen %d", many, len(l.seen))
}

// TestSurveyBesideAFifo: the configuration of a plugin may be anything; a fifo that
// nobody writes holds up nobody, and costs its own plugin only.
func TestSurveyBesideAFifo(t *testing.T) {
	source := Source{Enabled: true, PluginDir: t.TempDir(), ConfigDir: t.TempDir()}
	for _, plugin := range []string{"10-good", "20-fifo"} {
		harness.Check(t, os.WriteFile(filepath.Join(source.PluginDir, plugin), nil, 0o700))
	}
	harness.Check(t, unix.Mkfifo(filepath.Join(source.ConfigDir, "fifo.conf"), 0o600))
	plugins, problems := source.Survey()
	harness.Want(t, slices.Equal(plugins, []string{"10-good"}), "plugins that are started: %v", plugins)
	harness.Need(t, len(problems) == 1, "problems: %v", problems)
	harness.Want(t, strings.Contains(problems[0].Error(), "20-fifo"), "problems: %v", problems)
	harness.Want(t, strings.Contains(problems[0].Error(), "no regular file"), "problems: %v", problems)
}
