package container

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/stub"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

type nriNode struct {
	*nodetest.Node
	t   testing.TB
	dir string // of the socket, the plugins, their configuration and the log of the logger
}

// newNRINode makes a node whose configuration has these further keys in [nri].
func newNRINode(t testing.TB, keys string, opts ...nodetest.Option) *nriNode {
	dir, err := os.MkdirTemp("", "nri") // t.TempDir is too long for a socket
	check(t, err)
	t.Cleanup(func() { check(t, os.RemoveAll(dir)) })
	for _, sub := range []string{"plugins", "conf"} {
		check(t, os.Mkdir(filepath.Join(dir, sub), 0o755))
	}
	keys += "\nregistration_timeout = '1m'\n" // 5 s, and 2 s, are short on a machine that is emulated
	if !strings.Contains(keys, "request_timeout") {
		keys += "request_timeout = '1m'\n"
	}
	config := fmt.Sprintf("[nri]\nenabled = true\nsocket = '%[1]s/nri.sock'\nplugin_dir = '%[1]s/plugins'\nconfig_dir = '%[1]s/conf'\n%[2]s", dir, keys)
	return &nriNode{Node: newNode(t, append(opts, nodetest.Config(config))...), t: t, dir: dir}
}

// install gives the daemon a plugin to start, which is this program.
func (n *nriNode) install(index, name string) {
	n.writePlugin(index + "-" + name)
	check(n.t, os.WriteFile(filepath.Join(n.dir, "conf", name+".conf"), []byte(n.log()), 0o644))
}

func (n *nriNode) writePlugin(file string) {
	program, err := os.Executable()
	check(n.t, err)
	check(n.t, os.WriteFile(filepath.Join(n.dir, "plugins", file), []byte("#!/bin/sh\nexec "+program+"\n"), 0o755))
}

// connect connects a plugin by itself, until the test ends.
func (n *nriNode) connect(index, name string) stub.Stub {
	socket, goesOn := stub.WithSocketPath(filepath.Join(n.dir, "nri.sock")), stub.WithOnClose(func() {})
	s, err := newPlugin(name, n.log(), socket, stub.WithPluginName(name), stub.WithPluginIdx(index), goesOn)
	check(n.t, err)
	check(n.t, s.Start(context.Background()))
	n.t.Cleanup(s.Stop)
	n.awaitPlugin(index+"-"+name, true)
	return s
}

func (n *nriNode) awaitPlugin(name string, there bool) {
	harness.Eventually(n.t, fmt.Sprintf("plugin %s is connected: %t", name, there), func() bool { return slices.Contains(n.plugins(), name) == there })
}

// wantEvents fails the test unless these are all that a plugin has seen of a pod, without
// those of containers, or of one of its containers.
func (n *nriNode) wantEvents(pod, container string, want ...string) {
	same(n.t, "events of "+pod+" "+container, n.events(pod, container), want)
}

func (n *nriNode) plugins() (names []string) {
	return nodetest.Info[[]string](n.t, n.Node, "nriPlugins")
}

func (n *nriNode) log() string { return filepath.Join(n.dir, "log") }

func (n *nriNode) seen() (all []seen) {
	data := harness.Read(n.t, n.log())
	for line := range bytes.Lines(data[:bytes.LastIndexByte(data, '\n')+1]) { // the last one may be being written
		var one seen
		check(n.t, json.Unmarshal(line, &one))
		all = append(all, one)
	}
	return all
}

// events are those about a pod, without those of containers, or about one of its containers.
func (n *nriNode) events(pod, container string) (events []string) {
	for _, one := range n.seen() {
		if one.Pod == pod && one.Container == container {
			events = append(events, one.Event)
		}
	}
	return events
}

func (n *nriNode) find(event, pod, container string) (found seen) {
	all := n.seen()
	at := slices.IndexFunc(all, func(s seen) bool { return s.Event == event && s.Pod == pod && s.Container == container })
	harness.Need(n.t, at >= 0, "the plugin has seen no %s of %s %s: %v", event, pod, container, all)
	return all[at]
}

func annotated(key, value string) nodetest.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		if c.Annotations == nil {
			c.Annotations = make(map[string]string)
		}
		c.Annotations[key] = value
	}
}

// A plugin hears of everything in a pod's life, in order, with the network's namespace as long as that is there; one
// that the daemon has started, and one that connects again after the daemon was killed, which is sent what there is.
func TestNRIEvents(t *testing.T) {
	n := newNRINode(t, "")
	n.install("05", "logger")
	n.Restart()
	n.awaitPlugin("05-logger", true)
	p := runPod(t, n.Node, "web")
	id := p.run("app", forever, memory(64<<20))
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{CpuShares: 512}))
	nodetest.Call(t, n.Runtime.UpdatePodSandboxResources, &runtimeapi.UpdatePodSandboxResourcesRequest{
		PodSandboxId: p.id, Resources: &runtimeapi.LinuxContainerResources{CpuShares: 2048},
	})
	n.Kill()
	check(t, os.Remove(filepath.Join(n.dir, "plugins", "05-logger")))
	n.Start()
	n.connect("10", "logger")
	n.wantSynchronized("web")
	ended := p.run("ended", "exit 3")
	p.wantExit(ended, 3, "Error")
	harness.Eventually(t, "the plugin is notified of an end that nothing asked for", func() bool {
		return slices.Contains(n.events("web", "ended"), "StopContainer")
	})
	n.RemovePod(p.id)

	n.wantEvents("web", "", "RunPodSandbox", "UpdatePodSandbox", "PostUpdatePodSandbox", "StopPodSandbox", "RemovePodSandbox")
	n.wantEvents("web", "app", "CreateContainer", "PostCreateContainer", "StartContainer", "PostStartContainer",
		"UpdateContainer", "PostUpdateContainer", "StopContainer", "RemoveContainer")
	n.wantEvents("web", "ended", "CreateContainer", "PostCreateContainer", "StartContainer", "PostStartContainer", "StopContainer", "RemoveContainer")
	for event, there := range harness.Sorted(map[string]bool{"RunPodSandbox": true, "StopPodSandbox": true, "RemovePodSandbox": false}) {
		if one := n.find(event, "web", ""); one.NetnsThere != there || there && (len(one.IPs) == 0 || one.Netns == "") {
			t.Errorf("%s: the namespace is there: %t, want %t: %+v", event, one.NetnsThere, there, one)
		}
	}
	updated := n.find("PostUpdateContainer", "web", "app")
	expect(t, updated.Memory == 64<<20 && updated.Shares == 512, "resources after the update: %+v", updated)
}

// Everything that a plugin may adjust is so in the container that runs.
func TestNRIAdjustments(t *testing.T) {
	n := newNRINode(t, "")
	n.connect("10", "adjuster")
	source := n.dir + "/../" + filepath.Base(n.dir) + "/made/by minicri" // not there
	device := nodetest.CDIDevice(t, nodetest.Hook{Kind: "createRuntime", Script: "touch " + n.dir + "/cdi"})
	asked := n.cgroupsPath("from-nri")
	adjustment := fmt.Sprintf(`{
		"annotations": {"from": "nri"}, "args": ["/bin/sh", "-c", "while :; do sleep 0.05; done"],
		"env": [{"key": "FROM", "value": "nri"}, {"key": "-GONE"}],
		"mounts": [{"destination": "/gone/../../from-nri/.", "type": "bind", "source": %q, "options": ["rbind", "ro"]}, {"destination": "/scratch", "type": "tmpfs", "source": "tmpfs", "options": ["size=64k"]}],
		"rlimits": [{"type": "RLIMIT_NOFILE", "hard": "512", "soft": "256"}], "CDIDevices": [{"name": %q}],
		"hooks": {"createRuntime": [{"path": "/bin/sh", "args": ["sh", "-c", "touch %s/hook"]}]},
		"linux": {
			"oomScoreAdj": {"value": "700"}, "sysctl": {"kernel.shm_rmid_forced": "1"}, "cgroupsPath": %q,
			"devices": [{"path": "/dev/from-nri", "type": "c", "major": "1", "minor": "5", "fileMode": {"value": 438}}],
			"namespaces": [{"type": "cgroup"}],
			"seccompPolicy": {"defaultAction": "SCMP_ACT_ALLOW", "syscalls": [{"names": ["mkdir", "mkdirat"], "action": "SCMP_ACT_ERRNO"}]},
			"resources": {"memory": {"limit": {"value": "50331648"}}, "cpu": {"shares": {"value": "333"}, "cpus": "0"}, "pids": {"limit": "77"}}
		}}`, source, device, n.dir, asked)
	p := runPod(t, n.Node, "web", annotated("adjuster.nri.test/app", adjustment))
	id := p.run("app", "exit 1", memory(64<<20), env("GONE", "1"), env("KEPT", "1"))
	for what, want := range harness.Sorted(map[string][2]string{
		"env":      {"echo $FROM$GONE$KEPT", "nri1"},
		"mount":    {"grep -c ' /from-nri ' /proc/mounts; touch /from-nri/x 2>&1 | grep -c Read-only", "1\n1"},
		"tmpfs":    {"grep ' /scratch ' /proc/mounts | grep -c size=64k", "1"},
		"rlimits":  {"cat /proc/1/limits | grep 'open files' | tr -s ' ' | cut -d' ' -f4,5", "256 512"},
		"oom":      {"cat /proc/1/oom_score_adj", "700"},
		"sysctl":   {"cat /proc/sys/kernel/shm_rmid_forced", "1"},
		"device":   {"head -c 3 /dev/from-nri | od -An -tx1", " 00 00 00"},
		"seccomp":  {"mkdir /tmp/x 2>&1 | grep -c permitted", "1"},
		"cgroupns": {"[ $(readlink /proc/1/ns/cgroup) = '" + namespace(t, os.Getpid(), "cgroup") + "' ] || echo own", "own"},
	}) {
		same(t, what, p.exec(id, want[0]), strings.TrimSpace(want[1]))
	}
	spec := p.spec(id)
	same(t, "annotations", spec.Annotations["from"], "nri")
	same(t, "rlimits, one of each kind (runtime-spec, process.rlimits)", len(spec.Process.Rlimits), 15)
	for limit, want := range harness.Sorted(map[string]string{"memory": "50331648", "pids": "77", "cpus": "0"}) {
		same(t, limit, p.limit(id, limit), want)
	}
	for _, file := range []string{"cdi", "hook"} {
		_, err := os.Stat(filepath.Join(n.dir, file))
		expect(t, err == nil, "%s: %v", file, err)
	}
	same(t, "cgroup", p.info(id).CgroupsPath, cgroup.Path(asked))
	resources := p.status(id).Resources.Linux
	same(t, "status", []int64{resources.MemoryLimitInBytes, resources.CpuShares, resources.OomScoreAdj}, []int64{48 << 20, 333, 700})
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{CpuShares: 444}))
	resources = p.status(id).Resources.Linux
	same(t, "status after an update", []int64{resources.MemoryLimitInBytes, resources.CpuShares}, []int64{48 << 20, 444})
	same(t, "memory after an update", p.limit(id, "memory"), "50331648")
}

// wantSynchronized fails the test unless the last that a plugin has seen is this pod, with one container that runs.
func (n *nriNode) wantSynchronized(pod string) {
	all := n.seen()
	same(n.t, "last event", all[len(all)-1], seen{Event: "Synchronize", Pods: []string{pod}, Containers: []string{"app CONTAINER_RUNNING"}})
}

// cgroupsPath is how the node's driver is asked for a cgroup (runtime-spec).
func (n *nriNode) cgroupsPath(name string) string {
	return oci.CgroupsPath(n.CgroupParent, name, harness.CgroupDriver() == "systemd")
}

// What plugins make of a container is checked as the request is; one that makes
// nonsense fails the container, and nothing is left of it.
func TestNRIRefusesNonsense(t *testing.T) {
	n := newNRINode(t, "reject = ['hooks']")
	n.connect("10", "adjuster")
	link := filepath.Join(n.dir, "link")
	check(t, os.Symlink("/no/such/place", link))
	there := n.cgroupsPath(runPod(t, n.Node, "there").id)
	for name, row := range harness.Sorted(map[string]struct{ adjustment, says string }{
		"root":       {`{"mounts": [{"destination": "/", "type": "tmpfs"}]}`, "root of the container"},
		"up":         {`{"mounts": [{"destination": "/a/../..", "type": "tmpfs"}]}`, "root of the container"},
		"link":       {`{"mounts": [{"destination": "/a", "type": "bind", "source": "` + link + `", "options": ["rbind"]}]}`, "symbolic link"},
		"kernel":     {`{"mounts": [{"destination": "/a", "type": "bind", "source": "/proc/no-such", "options": ["rbind"]}]}`, "/proc/no-such"},
		"cpus":       {`{"linux": {"resources": {"cpu": {"cpus": "x"}}}}`, "cpuset_cpus"},
		"cgroup":     {`{"linux": {"cgroupsPath": "` + there + `"}}`, "is there already"},
		"nul":        {`{"linux": {"cgroupsPath": "` + n.cgroupsPath(`a-\u0000b`) + `"}}`, "NUL"},
		"long":       {`{"linux": {"cgroupsPath": "` + n.cgroupsPath(strings.Repeat("a", 256)) + `"}}`, "bytes, more than 255"},
		"rlimit":     {`{"rlimits": [{"type": "RLIMIT_NOFILE", "hard": "1", "soft": "2"}]}`, "RLIMIT_NOFILE"},
		"cdi":        {`{"CDIDevices": [{"name": "no.such/device=0"}]}`, "no.such/device=0"},
		"hooks":      {`{"hooks": {"poststop": [{"path": "/bin/true"}]}}`, "10-adjuster"},
		"annotation": {`no JSON`, "10-adjuster"},
		"env":        {`{"env": [{"key": "A", "value": "b\u0000"}]}`, "environment variable A: has a NUL"},
	}) {
		p := runPod(t, n.Node, name, annotated("adjuster.nri.test/app", row.adjustment))
		wantError(t, p.createErr(shell("app", forever)), row.says)
		same(t, fmt.Sprintf("%s: left", name), p.list(nil), nil)
		n.RemovePod(p.id)
	}
}

// A plugin moves a network device of the node into a container.
func TestNRINetworkDevices(t *testing.T) {
	fd, err := unix.Socket(unix.AF_NETLINK, unix.SOCK_RAW|unix.SOCK_CLOEXEC, unix.NETLINK_XFRM)
	if err != nil {
		t.Skipf("libcontainer moves devices on kernels with NETLINK_XFRM alone: %v", err)
	}
	check(t, unix.Close(fd))
	n := newNRINode(t, "")
	n.connect("10", "adjuster")
	n.RunInNetns(func() error {
		return netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "nri0"}, PeerName: "nri1"})
	})
	defer func() {
		if t.Failed() { // else it goes with the pod
			n.RunInNetns(func() error { return netlink.LinkDel(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "nri1"}}) })
		}
	}()
	p := runPod(t, n.Node, "web", annotated("adjuster.nri.test/app", `{"linux": {"netDevices": {"nri0": {"name": "data0"}}}}`))
	same(t, "network device", p.exec(p.run("app", forever), "ls /sys/class/net/ | grep data"), "data0")
}

// While a plugin hangs over one pod others wait, no longer than its limit or until that
// pod is removed; then it is disconnected, and named.
//
// attack: denial of service: an NRI plugin hangs for one pod
// held: that pod waits, and hooks of others, until the plugin's limit
func TestNRIPluginHangs(t *testing.T) {
	n := newNRINode(t, "request_timeout = '1h'")
	n.connect("10", "logger")
	other := runPod(t, n.Node, "other")
	hung := runPod(t, n.Node, "hung", annotated("hang.nri.test", "CreateContainer"))
	done := beside(func() error { return hung.createErr(shell("app", forever)) })
	harness.Eventually(t, "the plugin hangs", func() bool { return slices.Contains(n.events("hung", "app"), "CreateContainer") })
	waits := beside(func() error { return other.createErr(shell("waits", forever)) })
	n.RemovePod(hung.id) // abandons the container that is being made
	wantError(t, <-done)
	check(t, <-waits)
	check(t, other.stop(other.run("app", forever), 0))
	n.RemovePod(runPod(t, n.Node, "third").id)

	n.reload("request_timeout = '10s'\n")
	second := runPod(t, n.Node, "second", annotated("hang.nri.test", "StartContainer"))
	second.run("app", forever) // without the plugin
	n.awaitPlugin("10-logger", false)
	const says = "closing plugin 10-logger, failed to handle StartContainer"
	expect(t, strings.Contains(n.Log(), says), "the log does not name the plugin and the request")
}

// A plugin that dies in the middle of a request costs the pod nothing; one that
// says no fails the pod, with its name, and hears of the pod's end.
func TestNRIPluginDiesOrRefuses(t *testing.T) {
	n := newNRINode(t, "")
	n.connect("10", "logger")
	_, err := n.Runtime.RunPodSandbox(harness.Limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("refused", annotated("fail.nri.test", "RunPodSandbox"))})
	wantError(t, err, "10-logger", "refused is not wanted")
	n.wantEvents("refused", "", "RunPodSandbox", "StopPodSandbox", "RemovePodSandbox")
	died := runPod(t, n.Node, "died", annotated("die.nri.test", "CreateContainer"))
	died.run("app", forever)
	n.awaitPlugin("10-logger", false)
	n.connect("10", "logger")
	n.RemovePod(died.id)
	n.wantEvents("died", "", "RunPodSandbox", "StopPodSandbox", "RemovePodSandbox")
}

// A required plugin that is absent fails pods and containers, by name, but those that say they do without.
func TestNRIRequiredPlugin(t *testing.T) {
	n := newNRINode(t, "required_plugins = ['logger']\ntolerate_missing_annotation = 'tolerate.nri.test'")
	request := &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web")}
	wantError(t, nodetest.Err(t, n.Runtime.RunPodSandbox, request), "required NRI plugin logger")
	wantFound(t, n.Node, "required NRI plugin logger is not connected")
	runPod(t, n.Node, "tolerant", annotated("tolerate.nri.test", "true")).run("app", forever)
	logger := n.connect("10", "logger")
	p := runPod(t, n.Node, "web")
	logger.Stop()
	n.awaitPlugin("10-logger", false)
	wantError(t, p.createErr(shell("app", forever)), "required NRI plugin logger")
	n.RemovePod(p.id)
}

// A plugin changes what an update asks for, and updates containers by itself. What it wants for another container fails
// neither the creation nor the update of the one that it was asked about: that container may have ended just now.
func TestNRIUpdates(t *testing.T) {
	n := newNRINode(t, "")
	logger := n.connect("10", "logger")
	ended := runPod(t, n.Node, "ended").run("ended", "true")
	p := runPod(t, n.Node, "web", annotated("update.nri.test", `{"linux": {"resources": {"cpu": {"shares": {"value": "777"}}}}}`))
	id := p.run("app", forever, memory(64<<20))
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{CpuShares: 512, MemoryLimitInBytes: 48 << 20}))
	now := p.status(id).Resources.Linux
	expect(t, now.CpuShares == 777 && now.MemoryLimitInBytes == 48<<20, "after an update that the plugin changed: %v", now)
	send := func(id, resources string) error {
		asked, err := updates(fmt.Sprintf(`{"containerId": %q, "linux": {"resources": %s}}`, id, resources))
		check(t, err)
		failed, err := logger.UpdateContainers(asked)
		same(t, "updates that failed", len(failed), 0)
		return err
	}
	check(t, send(id, `{"memory": {"limit": {"value": "33554432"}}}`))
	same(t, "memory in the status", p.status(id).Resources.Linux.MemoryLimitInBytes, 32<<20)
	same(t, "memory", p.limit(id, "memory"), "33554432")
	wantError(t, send("no-such", `{"cpu": {"shares": {"value": "2"}}}`), "no-such")
	harness.Eventually(t, "the container has ended", func() bool { return slices.Contains(n.events("ended", "ended"), "StopContainer") })
	for name, other := range harness.Sorted(map[string]string{"no-such": "no-such", "has-ended": ended}) {
		p := runPod(t, n.Node, name, annotated("others.nri.test", fmt.Sprintf(`{"containerId": %q, "linux": {"resources": {"cpu": {"shares": {"value": "100"}}}}}`, other)))
		id := p.run("app", forever, memory(64<<20))
		check(t, p.update(id, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 48 << 20}))
		same(t, "memory", p.limit(id, "memory"), fmt.Sprint(48<<20))
		warning := regexp.MustCompile(`level=WARN.*10-logger.*` + other)
		expect(t, warning.MatchString(n.Log()), "%s: no warning names the plugin and the container", name)
	}
	// An answer that is refused changes no other container.
	n.connect("20", "adjuster")
	refused := runPod(t, n.Node, "refused", annotated("adjuster.nri.test/app", `{"env": [{"key": "A", "value": "b\u0000"}]}`),
		annotated("others.nri.test", fmt.Sprintf(`{"containerId": %q, "linux": {"resources": {"cpu": {"shares": {"value": "100"}}}}}`, id)))
	wantRefused(t, refused.createErr(shell("app", forever)), "environment variable A: has a NUL")
	same(t, "shares after an answer that was refused", p.status(id).Resources.Linux.CpuShares, int64(777))
}

// reload puts other keys of [nri] into force, and waits until they are.
func (n *nriNode) reload(keys string) { reload(n.t, n.Node, "[nri]\n"+keys) }

// newPlugin makes an NRI plugin, of the stub that others are made of: logger writes down every request, and
// annotations of pods make it fail, hang or die; one of any other name adjusts containers as annotations say.
func newPlugin(name, log string, options ...stub.Option) (stub.Stub, error) {
	if name != "logger" {
		return stub.New(adjuster{name}, options...)
	}
	l := &logger{file: log}
	s, err := stub.New(l, options...)
	l.Stub = s
	return s, err
}

// bePlugin runs this program as the plugin that a daemon has started.
func bePlugin(name string) {
	s, err := newPlugin(name, "")
	if err == nil {
		err = s.Run(context.Background())
	}
	fmt.Fprintln(os.Stderr, "plugin", name+":", err)
}

// seen is what a logger writes down of a request.
type seen struct {
	Event, Pod, Container, Netns, State string

	NetnsThere bool // whether something is at the path of the namespace
	IPs        []string
	Memory     int64
	Shares     uint64
	Pods       []string // those it was synchronized with
	Containers []string
}

type logger struct {
	stub.Stub
	mu   sync.Mutex
	file string // or that which its configuration names
}

func (l *logger) write(s seen) {
	l.mu.Lock()
	defer l.mu.Unlock()
	file, err := os.OpenFile(l.file, os.O_APPEND|os.O_CREATE|os.O_WRONLY, 0o644)
	if err == nil {
		err = errors.Join(json.NewEncoder(file).Encode(s), file.Close())
	}
	if err != nil {
		panic(err)
	}
}

// note writes a request down, and then does what annotations of the pod want:
// fail.nri.test, hang.nri.test and die.nri.test name an event.
func (l *logger) note(event string, pod *api.PodSandbox, c *api.Container) error {
	s := seen{Event: event, Pod: pod.GetName(), IPs: pod.GetIps(), Container: c.GetName(), State: c.GetState().String()}
	for _, namespace := range pod.GetLinux().GetNamespaces() {
		if namespace.GetType() == "network" {
			s.Netns = namespace.GetPath()
			_, err := os.Stat(s.Netns)
			s.NetnsThere = err == nil
		}
	}
	resources := c.GetLinux().GetResources()
	s.Memory, s.Shares = resources.GetMemory().GetLimit().GetValue(), resources.GetCpu().GetShares().GetValue()
	l.write(s)
	annotations := pod.GetAnnotations()
	switch event {
	case annotations["fail.nri.test"]:
		return fmt.Errorf("%s is not wanted", pod.GetName())
	case annotations["die.nri.test"]:
		l.Stop()
	case annotations["hang.nri.test"]:
		select {} // longer than it is waited for
	}
	return nil
}

func (l *logger) Configure(_ ctx, config, _, _ string) (api.EventMask, error) {
	if l.file == "" {
		l.file = config
	}
	return 0, nil
}

func (l *logger) Synchronize(_ ctx, pods []*api.PodSandbox, containers []*api.Container) ([]*api.ContainerUpdate, error) {
	s := seen{Event: "Synchronize"}
	for _, pod := range pods {
		s.Pods = append(s.Pods, pod.GetName())
	}
	for _, c := range containers {
		s.Containers = append(s.Containers, c.GetName()+" "+c.GetState().String())
	}
	l.write(s)
	return nil, nil
}

type ctx = context.Context

func (l *logger) RunPodSandbox(_ ctx, p *api.PodSandbox) error {
	return l.note("RunPodSandbox", p, nil)
}

func (l *logger) PostUpdatePodSandbox(_ ctx, p *api.PodSandbox) error {
	return l.note("PostUpdatePodSandbox", p, nil)
}

func (l *logger) StopPodSandbox(_ ctx, p *api.PodSandbox) error {
	return l.note("StopPodSandbox", p, nil)
}

func (l *logger) RemovePodSandbox(_ ctx, p *api.PodSandbox) error {
	return l.note("RemovePodSandbox", p, nil)
}

func (l *logger) UpdatePodSandbox(_ ctx, p *api.PodSandbox, _, _ *api.LinuxResources) error {
	return l.note("UpdatePodSandbox", p, nil)
}

func (l *logger) PostCreateContainer(_ ctx, p *api.PodSandbox, c *api.Container) error {
	return l.note("PostCreateContainer", p, c)
}

func (l *logger) StartContainer(_ ctx, p *api.PodSandbox, c *api.Container) error {
	return l.note("StartContainer", p, c)
}

func (l *logger) PostStartContainer(_ ctx, p *api.PodSandbox, c *api.Container) error {
	return l.note("PostStartContainer", p, c)
}

func (l *logger) PostUpdateContainer(_ ctx, p *api.PodSandbox, c *api.Container) error {
	return l.note("PostUpdateContainer", p, c)
}

func (l *logger) RemoveContainer(_ ctx, p *api.PodSandbox, c *api.Container) error {
	return l.note("RemoveContainer", p, c)
}

func (l *logger) StopContainer(_ ctx, p *api.PodSandbox, c *api.Container) ([]*api.ContainerUpdate, error) {
	return nil, l.note("StopContainer", p, c)
}

// CreateContainer answers with the annotation others.nri.test of the pod, an update of another container.
func (l *logger) CreateContainer(_ ctx, p *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	others, err := updates(p.GetAnnotations()["others.nri.test"])
	return nil, others, errors.Join(l.note("CreateContainer", p, c), err)
}

// UpdateContainer answers with the annotation update.nri.test, or with others.nri.test.
func (l *logger) UpdateContainer(_ ctx, p *api.PodSandbox, c *api.Container, _ *api.LinuxResources) ([]*api.ContainerUpdate, error) {
	own, err := updates(p.GetAnnotations()["update.nri.test"])
	if err != nil || own == nil {
		own, err = updates(p.GetAnnotations()["others.nri.test"])
	} else {
		own[0].ContainerId = c.GetId()
	}
	return own, errors.Join(l.note("UpdateContainer", p, c), err)
}

// updates is the one that a text has, if there is one.
func updates(text string) ([]*api.ContainerUpdate, error) {
	if text == "" {
		return nil, nil
	}
	one := &api.ContainerUpdate{}
	err := protojson.Unmarshal([]byte(text), one)
	return []*api.ContainerUpdate{one}, err
}

// adjuster adjusts the containers whose pod has the annotation NAME.nri.test/CONTAINER, which is the adjustment.
type adjuster struct{ name string }

func (a adjuster) CreateContainer(_ ctx, p *api.PodSandbox, c *api.Container) (*api.ContainerAdjustment, []*api.ContainerUpdate, error) {
	value, asked := p.GetAnnotations()[a.name+".nri.test/"+c.GetName()]
	if !asked {
		return nil, nil, nil
	}
	adjustment := &api.ContainerAdjustment{}
	return adjustment, nil, protojson.Unmarshal([]byte(value), adjustment)
}
