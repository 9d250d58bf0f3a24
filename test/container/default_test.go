package container

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// limitsOf are lines of /proc/PID/limits, soft and hard limit, by name.
func limitsOf(t *testing.T, text string) map[string]string {
	t.Helper()
	limits := make(map[string]string)
	for line := range strings.Lines(text) {
		if len(line) > 65 {
			limits[strings.TrimSpace(line[:26])] = strings.Join(strings.Fields(line[26:65]), ":")
		}
	}
	if len(limits) < 16 {
		t.Errorf("limits: %q", text)
	}
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
	text, err := os.ReadFile(fmt.Sprintf("/proc/%d/limits", p.info(id).PID))
	check(t, err)
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
	n := newNode(t, harness.Config(fmt.Sprintf(`
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
	same(t, "capabilities and filter", p.exec(id, "grep -E '^(CapBnd|Seccomp):' /proc/1/status | tr -s '\t\n' ' '"), "CapBnd: 0000000000000021 Seccomp: 2")
	unconfined := p.run("unconfined", forever, func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_TIME"}, DropCapabilities: []string{"KILL"}}
		c.Linux.SecurityContext.Seccomp = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_Unconfined}
	})
	same(t, "those of one that says otherwise", p.exec(unconfined, "grep -E '^(CapBnd|Seccomp):' /proc/1/status | tr -s '\t\n' ' '"), "CapBnd: 0000000002000001 Seccomp: 0")
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
	annotations := p.spec(id).Annotations
	if annotations["hooks.example/pod"] != "p" || annotations["hooks.example/container"] != "c" || annotations["other.example/pod"] != "" {
		t.Errorf("annotations of the spec: %v", annotations)
	}
	free := runPod(t, n, "privileged", privilegedPod)
	id = free.run("app", forever, privileged)
	same(t, "sysfs of a privileged container", free.exec(id, "grep -c '^sysfs /sys sysfs rw' /proc/mounts"), "1")
	// A pod in the namespaces of the node leaves them as they are.
	before, err := os.ReadFile("/proc/sys/kernel/msgmax")
	check(t, err)
	host := runPod(t, n, "host", harness.HostNetwork(), func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions.Ipc = runtimeapi.NamespaceMode_NODE
	})
	host.run("app", forever)
	after, err := os.ReadFile("/proc/sys/kernel/msgmax")
	check(t, err)
	same(t, "kernel.msgmax of the node", string(after), string(before))
}

func (p *pod) spec(id string) (spec specs.Spec) {
	p.t.Helper()
	data, err := os.ReadFile(filepath.Join(p.State, "containers", id, "config.json"))
	check(p.t, err)
	check(p.t, json.Unmarshal(data, &spec))
	return spec
}
