package container

import (
	"encoding/json"
	"fmt"
	"math"
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// The time-outs of the CRI are any int64: more seconds than a Duration holds are a long time, and no short one.
//
// cri: ExecSyncResponse.stdout
func TestTimeoutsBeyondADuration(t *testing.T) {
	p := newPod(t)
	for _, seconds := range []int64{1e10, math.MaxInt64} {
		id := p.run("app", forever)
		p.awaitLine(id, "ready")
		answer, err := p.tryExec(id, seconds, "/bin/sh", "-c", "sleep 0.3; echo done")
		check(t, err)
		same(t, "exec", string(answer.Stdout), "done\n")
		check(t, p.stop(id, seconds))
		p.wantExit(id, 10, "Error") // of its trap: it had the time to end by itself
		check(t, p.remove(id))
	}
	id := p.run("app", forever)
	check(t, p.stop(id, math.MinInt64))
	p.wantExit(id, 137, "Error")
}

// What is meant for Windows would have no effect, and is refused by its name.
//
// cri: ContainerConfig.windows PodSandboxConfig.windows UpdateContainerResourcesRequest.windows
func TestFieldsOfWindows(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever, memory(64<<20))
	other := *p
	other.config = proto.CloneOf(p.config)
	other.config.Windows = &runtimeapi.WindowsPodSandboxConfig{}
	_, err := p.Runtime.UpdateContainerResources(harness.Limited(t), &runtimeapi.UpdateContainerResourcesRequest{
		ContainerId: id, Linux: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20}, Windows: &runtimeapi.WindowsContainerResources{},
	})
	wantRefused(t, err, "windows")
	same(t, "memory after a refused update", p.status(id).Resources.GetLinux().GetMemoryLimitInBytes(), 64<<20)
	wantRefused(t, other.createErr(shell("windows", forever)), "sandbox_config.windows")
	_, err = p.Image.PullImage(harness.Limited(t), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: nodetest.BusyboxImage}, SandboxConfig: other.config})
	wantRefused(t, err, "sandbox_config.windows:")
	own := func(c *runtimeapi.ContainerConfig) { c.Windows = &runtimeapi.WindowsContainerConfig{} }
	wantRefused(t, p.createErr(shell("windows", forever, own)), "config.windows")
	wantRefused(t, nodetest.Err(t, p.Runtime.RunPodSandbox, &runtimeapi.RunPodSandboxRequest{Config: other.config}), "config.windows:")
}

// What can be seen to be wrong before anything is made is refused by its name: an image for a runtime handler that
// there is not, a limit of memory and swap together without one of memory, a word that no program can get, an
// environment that no program can be executed with. The largest one that is none is passed on.
//
// cri: ImageSpec.runtime_handler LinuxContainerResources.memory_swap_limit_in_bytes ExecSyncRequest.cmd
func TestRefusedBeforeAnythingIsMade(t *testing.T) {
	p := newPod(t)
	before := p.Look()
	many := func(count, size int) option {
		return func(c *runtimeapi.ContainerConfig) {
			for i := range count {
				env(fmt.Sprint("A", i), strings.Repeat("x", size))(c)
			}
		}
	}
	for _, c := range []struct {
		names  string
		change option
	}{
		{"config.image.runtime_handler", func(c *runtimeapi.ContainerConfig) { c.Image.RuntimeHandler = "no-such" }},
		{"config.mounts[0].image.runtime_handler", imageMount("/data", func(m *runtimeapi.Mount) { m.Image.RuntimeHandler = "no-such" })},
		{"config.linux.resources.memory_swap_limit_in_bytes", func(c *runtimeapi.ContainerConfig) { c.Linux.Resources.MemorySwapLimitInBytes = 100 << 20 }},
		{"LARGE", env("LARGE", strings.Repeat("x", 128<<10))},
		{"", many(64, 100<<10)},
		{"", func(c *runtimeapi.ContainerConfig) {
			c.Args = slices.Repeat([]string{strings.Repeat("x", 100<<10)}, 100)
		}},
	} {
		_, err := p.tryCreate(shell("app", forever, noLog, c.change))
		wantRefused(t, err, c.names)
		expect(t, len(fmt.Sprint(err)) <= 1000, "an error of %d bytes", len(fmt.Sprint(err)))
	}
	same(t, "differences", p.Differences(before), nil)
	id := p.run("app", "echo ${#LARGE}; "+forever, many(10, 100<<10), env("LARGE", strings.Repeat("x", 128<<10-100)))
	p.awaitLine(id, "130972")
	same(t, "arguments in the verbose status", len(p.info(id).RuntimeSpec.Process.Args), 3)
	wantCode(t, p.execErr(id, "echo", "a\x00b"), codes.InvalidArgument)
	_, err := p.Runtime.Exec(harness.Limited(t), &runtimeapi.ExecRequest{ContainerId: id, Cmd: []string{"echo", "a\x00b"}, Stdout: true})
	wantCode(t, err, codes.InvalidArgument)
}

// What the kubelet takes for granted of every status, in every state and over a restart: the path of the log is
// absolute and never empty, the network mode is the one that was asked for, and addresses can be parsed; there are
// some where the pod is Ready in a network of its own, and none else.
func TestProperty31_FormOfEveryStatus(t *testing.T) {
	n := newNode(t, nodetest.DualStack())
	noLogs := func(c *runtimeapi.PodSandboxConfig) { c.LogDirectory = "" }
	pods := []*pod{runPod(t, n, "own"), runPod(t, n, "host", nodetest.HostNetwork()), runPod(t, n, "no-logs", noLogs)}
	var containers []string
	for _, p := range pods {
		containers = append(containers, p.run("lives", forever), p.run("ended", "exit 1"), p.create(shell("waits", "true")), p.create(shell("none", "true", noLog)), p.create(shell("deep", "true", logPath("deep/app.log"))))
		p.awaitExit(containers[len(containers)-4])
	}
	look := func() {
		for _, id := range containers {
			path := pods[0].status(id).LogPath
			expect(t, filepath.IsAbs(path), "the log of %v is at %q", pods[0].status(id).Metadata, path)
		}
		for _, p := range pods {
			answer := nodetest.Call(t, n.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.id})
			s := answer.Status
			// A kubelet takes an answer with a time for one with all containers.
			expect(t, answer.Timestamp > 0, "the status of %s has no time", s.Metadata.Name)
			same(t, "containers in the status of "+s.Metadata.Name, len(answer.ContainersStatuses), len(containers)/len(pods))
			for _, c := range answer.ContainersStatuses {
				same(t, "status of container "+c.Metadata.Name, c, p.status(c.Id))
			}
			mode := p.config.Linux.SecurityContext.NamespaceOptions.Network
			same(t, "network mode of "+s.Metadata.Name, s.GetLinux().GetNamespaces().GetOptions().GetNetwork(), mode)
			all := []string{s.GetNetwork().GetIp()}
			for _, ip := range s.GetNetwork().GetAdditionalIps() {
				all = append(all, ip.Ip)
			}
			if mode == runtimeapi.NamespaceMode_NODE || s.State != runtimeapi.PodSandboxState_SANDBOX_READY {
				same(t, "addresses of "+s.Metadata.Name, all, []string{""})
				continue
			}
			same(t, "number of addresses of "+s.Metadata.Name, len(all), 2)
			for _, ip := range all {
				_, err := netip.ParseAddr(ip)
				check(t, err)
			}
		}
	}
	look()
	n.Restart()
	look()
	for _, p := range pods {
		check(t, p.stopPod())
	}
	look()
}

// limitsOf are lines of /proc/PID/limits, soft and hard limit, by name.
func limitsOf(t *testing.T, text string) map[string]string {
	limits := make(map[string]string)
	for line := range strings.Lines(text) {
		if len(line) > 65 {
			limits[strings.TrimSpace(line[:26])] = strings.Join(strings.Fields(line[26:65]), ":")
		}
	}
	expect(t, len(limits) >= 16, "limits: %q", text)
	return limits
}

// Limits of processes do not follow those of the daemon, which are its own.
func TestLimitsOfProcesses(t *testing.T) {
	p := newPod(t)
	// As if the daemon had been started from a shell with these soft limits.
	for resource, soft := range map[int]uint64{
		unix.RLIMIT_STACK: 4 << 20, unix.RLIMIT_CORE: 1 << 20, unix.RLIMIT_FSIZE: 1 << 40, unix.RLIMIT_NOFILE: 3333,
	} {
		var limit unix.Rlimit
		check(t, unix.Prlimit(p.PID(), resource, nil, &limit))
		limit.Cur = min(soft, limit.Max)
		check(t, unix.Prlimit(p.PID(), resource, &limit, nil))
	}
	id := p.run("app", forever)
	text := harness.Read(t, fmt.Sprintf("/proc/%d/limits", p.info(id).PID))
	same(t, "limits of a command", p.exec(id, "cat /proc/self/limits"), strings.TrimSpace(string(text)))
	limits := limitsOf(t, string(text))
	var own unix.Rlimit
	check(t, unix.Getrlimit(unix.RLIMIT_NOFILE, &own))
	same(t, "open files", limits["Max open files"], fmt.Sprintf("1024:%d", min(own.Max, 524288)))
	same(t, "stack", limits["Max stack size"], "8388608:unlimited")
	same(t, "core", limits["Max core file size"], "unlimited:unlimited")
	same(t, "real-time priority", limits["Max realtime priority"], "0:0")
}

// What the configuration gives to all pods and containers is in them, and pods
// and containers that say otherwise have the last word.
func TestNodeDefaults(t *testing.T) {
	base := filepath.Join(t.TempDir(), "base.json")
	const spec = `{
		"process": {"env": ["BASE=of the base", "WHOSE=base"], "rlimits": [{"type": "RLIMIT_CPU", "soft": 1000, "hard": 2000}]},
		"mounts": [
			{"destination": "/scratch", "type": "tmpfs", "source": "tmpfs", "options": ["size=1m"]},
			{"destination": "/sys", "type": "sysfs", "source": "sysfs", "options": ["nosuid", "noexec", "nodev", "ro"]}
		],
		"linux": {"resources": {"memory": {"limit": 67108864}, "cpu": {"quota": 55000, "period": 100000}}}}`
	check(t, os.WriteFile(base, []byte(spec), 0o600))
	cdi := t.TempDir()
	check(t, os.WriteFile(filepath.Join(cdi, "knob.json"), []byte(`{"cdiVersion": "0.6.0", "kind": "vendor.example/knob", "devices": [{"name": "0", "containerEdits": {"env": ["CDI=of the vendor"]}}]}`), 0o644))
	n := newNode(t, nodetest.Config(fmt.Sprintf(`
default_capabilities = ["CHOWN", "CAP_KILL"]
default_seccomp = "runtime/default"
default_apparmor = "unconfined"
cdi_spec_dirs = [%q]
default_ulimits = ["nofile=2048:4096", "core=0:0"]
default_env = ["WHOSE=node", "GIVEN=by the node", "WON=node"]
default_sysctls = ["net.ipv4.ip_default_ttl=77", "net.core.somaxconn=1111", "net.ipv4.conf.eth0.arp_filter=1", "kernel.msgmax=9999"]
shm_size = 1048576
pod_annotations = ["hooks.example/*"]
container_annotations = ["hooks.example/*"]
device_ownership_from_security_context = true
base_spec = %q
`, cdi, base)))
	p := runPod(t, n, "web", func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.Sysctls = map[string]string{"net.core.somaxconn": "2222"}
		c.Annotations = map[string]string{"hooks.example/pod": "p", "other.example/pod": "o"}
	})
	id := p.run("app", forever, env("WON", "container"), asUser(1234), func(c *runtimeapi.ContainerConfig) {
		c.Annotations = map[string]string{"hooks.example/container": "c"}
		c.Devices = []*runtimeapi.Device{{HostPath: "/dev/null", ContainerPath: "/dev/given", Permissions: "rw"}}
		c.CDIDevices = []*runtimeapi.CDIDevice{{Name: "vendor.example/knob=0"}}
		c.Linux.SecurityContext.RunAsGroup = &runtimeapi.Int64Value{Value: 567}
	})
	same(t, "variables", p.exec(id, "echo $BASE, $WHOSE, $GIVEN, $WON, $CDI"), "of the base, node, by the node, container, of the vendor")
	const confinement = "grep -E '^(CapBnd|Seccomp):' /proc/1/status | tr -s '\t\n' ' '"
	same(t, "capabilities and filter", p.exec(id, confinement), "CapBnd: 0000000000000021 Seccomp: 2")
	unconfined := p.run("unconfined", forever, secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_TIME"}, DropCapabilities: []string{"KILL"}}
		s.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}
	}))
	same(t, "those of one that says otherwise", p.exec(unconfined, confinement), "CapBnd: 0000000002000001 Seccomp: 0")
	limits := limitsOf(t, p.exec(id, "cat /proc/self/limits"))
	same(t, "open files", limits["Max open files"], "2048:4096")
	same(t, "core", limits["Max core file size"], "0:0")
	same(t, "cpu time", limits["Max cpu time"], "1000:2000")
	same(t, "sysctls", p.exec(id, "cd /proc/sys; cat net/ipv4/ip_default_ttl net/core/somaxconn net/ipv4/conf/eth0/arp_filter kernel/msgmax"), "77\n2222\n1\n9999")
	same(t, "shm", p.exec(id, "df -k /dev/shm | tail -n 1 | awk '{print $2}'"), "1024")
	same(t, "scratch", p.exec(id, "grep -c ' /scratch tmpfs ' /proc/mounts"), "1")
	same(t, "owner of the device", p.exec(id, "stat -c %u:%g /dev/given /dev/null"), "1234:567\n0:0")
	same(t, "memory", p.limit(id, "memory"), "67108864")
	same(t, "quota", p.limit(id, "quota"), "55000")
	same(t, "memory of a container that has a limit of its own", p.limit(p.run("own", forever, memory(96<<20)), "memory"), "100663296")
	of := p.spec(id).Annotations
	same(t, "annotations of the spec", of["hooks.example/pod"]+of["hooks.example/container"]+of["other.example/pod"], "pc")
	free := runPod(t, n, "privileged", privilegedPod)
	same(t, "sysfs of a privileged container", free.output("app", "grep -c '^sysfs /sys sysfs rw' /proc/mounts", privileged), "1")
	// A pod in the namespaces of the node leaves them as they are.
	before := harness.Read(t, "/proc/sys/kernel/msgmax")
	runPod(t, n, "host", nodetest.HostNetwork(), nodeIPC).run("app", forever)
	same(t, "kernel.msgmax of the node", string(harness.Read(t, "/proc/sys/kernel/msgmax")), string(before))
}

func (p *pod) spec(id string) (spec specs.Spec) {
	check(p.t, json.Unmarshal(harness.Read(p.t, filepath.Join(p.State, "containers", id, "config.json")), &spec))
	return spec
}
