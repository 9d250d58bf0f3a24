//go:build vm

package container

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// These tests need a machine that systemd runs, with cgroup v2 alone, and the
// driver systemd (MINICRI_CGROUP_DRIVER): that is the guest of hack/um.

// newSlicedPod makes a pod as a kubelet does, in a slice of its own.
func newSlicedPod(t *testing.T) (p *pod, slice string) {
	n := newNode(t)
	slice = n.MakeCgroup("pod1")
	return runPod(t, n, "web", func(c *runtimeapi.PodSandboxConfig) { c.Linux.CgroupParent = slice }), slice
}

func file(t *testing.T, path, name string) string {
	return strings.TrimSpace(string(harness.Read(t, filepath.Join("/sys/fs/cgroup", path, name))))
}

// property asks systemd for what it thinks of a unit.
func property(t *testing.T, unit, name string) string {
	return program(t, "systemctl", "show", "--value", "--property", name, unit)
}

func TestContainersAreScopesOfThePodsSlice(t *testing.T) {
	p, slice := newSlicedPod(t)
	id := p.run("app", forever)
	path := p.info(id).CgroupsPath
	same(t, "slice", filepath.Dir(path), slice)
	same(t, "state of "+path, property(t, filepath.Base(path), "ActiveState"), "active")
	same(t, "slice by systemd", property(t, filepath.Base(path), "Slice"), filepath.Base(slice))
	same(t, "delegation", property(t, filepath.Base(path), "Delegate"), "yes")
	data, _ := os.ReadFile("/proc/" + strconv.Itoa(p.info(id).PID) + "/cgroup")
	expect(t, strings.TrimSpace(string(data)) == "0::"+path, "the container is in %s, not in %s", data, path)
	scopes, err := filepath.Glob("/sys/fs/cgroup" + slice + "/*.scope")
	expect(t, err == nil && len(scopes) == 2, "want a scope for pause and one for the container, got %v, %v", scopes, err)
	same(t, "exec", p.exec(id, "echo hi"), "hi")
	check(t, p.stop(id, 10))
	check(t, p.remove(id))
	harness.Eventually(t, "systemd forgets the scope", func() bool { return property(t, filepath.Base(path), "LoadState") == "not-found" })
}

// An update has to last: systemd sets again what it knows when it is reloaded.
func TestLimitsStayWhenSystemdIsReloaded(t *testing.T) {
	p, _ := newSlicedPod(t)
	id := p.run("app", forever, memory(64<<20), func(c *runtimeapi.ContainerConfig) {
		r := c.Linux.Resources
		r.CpuShares, r.CpuQuota, r.CpuPeriod, r.CpusetCpus = 512, 50000, 100000, "0"
	})
	path := p.info(id).CgroupsPath
	limits := func() []string {
		return []string{file(t, path, "memory.max"), file(t, path, "cpu.max"), file(t, path, "cpuset.cpus")}
	}
	same(t, "created", limits(), []string{"67108864", "50000 100000", "0"})
	before := file(t, path, "cpu.weight")
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 96 << 20, CpuQuota: 80000, CpuShares: 2048}))
	updated, weight := []string{"100663296", "80000 100000", "0"}, file(t, path, "cpu.weight")
	expect(t, weight != before, "the weight is still %s", weight)
	same(t, "updated", limits(), updated)
	program(t, "systemctl", "daemon-reload")
	same(t, "reloaded", append(limits(), file(t, path, "cpu.weight")), append(updated, weight))
	// The device rules are systemd's too.
	p.exec(id, ": > /dev/null; mknod /tmp/loop c 10 237 && ! (: > /tmp/loop)")
}

// systemd removes the cgroup of a scope as soon as that is empty: the counter of the kernel's kills goes with it.
func TestOOMKillsAreSeen(t *testing.T) {
	p, _ := newSlicedPod(t)
	for i := range 10 {
		id := p.run("oom", "exec tail /dev/zero", memory(16<<20), attempt(uint32(i)))
		p.wantExit(id, 137, "OOMKilled")
		check(t, p.remove(id))
	}
	// One that is killed otherwise is not taken for it.
	killed := p.run("killed", forever, memory(16<<20))
	check(t, p.stop(killed, 0))
	p.wantExit(killed, 137, "Error")
}

// A container may divide its own cgroup, as a nested init does: then no process can be in the cgroup itself.
func TestCgroupsInsideOfAScope(t *testing.T) {
	p, _ := newSlicedPod(t)
	id := p.run("app", "exec sleep 1000000")
	path := p.info(id).CgroupsPath
	dir := filepath.Join("/sys/fs/cgroup", path)
	check(t, os.Mkdir(filepath.Join(dir, "inner"), 0o755))
	// One of threads, as a virtual machine has for its processors: then every other is of threads, or none.
	check(t, os.WriteFile(filepath.Join(dir, "inner/cgroup.type"), []byte("threaded"), 0))
	same(t, "exec beside threads", p.exec(id, "echo hi"), "hi")
	check(t, os.Remove(filepath.Join(dir, "inner")))
	check(t, os.Mkdir(filepath.Join(dir, "inner"), 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "inner/cgroup.procs"), []byte(strconv.Itoa(p.info(id).PID)), 0))
	check(t, os.WriteFile(filepath.Join(dir, "cgroup.subtree_control"), []byte("+memory"), 0))
	same(t, "exec", p.exec(id, "echo hi"), "hi")
	check(t, p.stop(id, 0))
	check(t, p.remove(id))
	harness.Eventually(t, path+" is gone", func() bool { _, err := os.Stat(dir); return err != nil })
}

// One that sees the machine's cgroups can leave its own, and ends all the same.
func TestContainerThatLeavesItsScope(t *testing.T) {
	p := newPod(t, privilegedPod)
	outside := "/sys/fs/cgroup/outside-" + p.id[:8]
	id := p.run("app", "mkdir "+outside+" && echo $$ > "+outside+"/cgroup.procs && "+forever, privileged)
	p.awaitLine(id, "ready")
	processes, err := os.ReadFile(outside + "/cgroup.procs")
	expect(t, err == nil && len(processes) > 0, "it has not left: %v", err)
	check(t, p.stop(id, 0))
	p.wantExit(id, 137, "Error")
	check(t, p.remove(id))
	check(t, os.Remove(outside))
}

// What is asked for by the name of a file of cgroup v2 is written to it, at the
// creation and by an update, which keeps the other keys.
//
// cri: LinuxContainerResources.unified
func TestUnified(t *testing.T) {
	p, _ := newSlicedPod(t)
	id := p.run("app", forever, func(c *runtimeapi.ContainerConfig) {
		c.Linux.Resources.Unified = map[string]string{"memory.high": "67108864", "pids.max": "50", "memory.oom.group": "1"}
	})
	path := p.info(id).CgroupsPath
	same(t, "memory.high", file(t, path, "memory.high"), "67108864")
	same(t, "pids.max", file(t, path, "pids.max"), "50")
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{Unified: map[string]string{"memory.high": "33554432"}}))
	same(t, "memory.high after the update", file(t, path, "memory.high"), "33554432")
	same(t, "pids.max after the update", file(t, path, "pids.max"), "50")
	same(t, "memory.oom.group after the update", file(t, path, "memory.oom.group"), "1")
	unified := p.status(id).Resources.GetLinux().GetUnified()
	expect(t, unified["memory.high"] == "33554432" && unified["pids.max"] == "50", "the status says %v", unified)
}

func appArmor(kind runtimeapi.SecurityProfile_ProfileType, name string) option {
	return secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Apparmor = &runtimeapi.SecurityProfile{ProfileType: kind, LocalhostRef: name}
	})
}

func confinement(t *testing.T, pid int) string {
	return strings.TrimRight(string(harness.Read(t, fmt.Sprintf("/proc/%d/attr/apparmor/current", pid))), "\n\x00")
}

// cri: LinuxContainerSecurityContext.apparmor
func TestAppArmor(t *testing.T) {
	p := newPod(t, func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.Apparmor = &runtimeapi.SecurityProfile{ProfileType: runtimeapi.SecurityProfile_RuntimeDefault}
	})
	const confined = "minicri-default (enforce)"
	same(t, "pause", confinement(t, p.pausePID()), confined)
	loadTestProfile(t)
	for name, c := range harness.Sorted(map[string]struct {
		option option
		want   string
	}{
		"unnamed":    {func(*runtimeapi.ContainerConfig) {}, confined},
		"default":    {appArmor(runtimeapi.SecurityProfile_RuntimeDefault, ""), confined},
		"unconfined": {appArmor(runtimeapi.SecurityProfile_Unconfined, ""), "unconfined"},
		"localhost":  {appArmor(runtimeapi.SecurityProfile_Localhost, testProfile), testProfile + " (enforce)"},
		"prefixed":   {appArmor(runtimeapi.SecurityProfile_Localhost, "localhost/"+testProfile), testProfile + " (enforce)"},
	}) {
		id := p.run(name, forever, c.option)
		same(t, name, confinement(t, p.info(id).PID), c.want)
		same(t, "an exec in "+name, p.exec(id, "cat /proc/self/attr/apparmor/current"), c.want)
		check(t, p.stop(id, 10))
	}
	wantCode(t, p.createErr(shell("unknown", "true", appArmor(runtimeapi.SecurityProfile_Localhost, "no-such-profile"))), codes.InvalidArgument)
	// One that takes no signals cannot be told to end.
	silent := p.run("silent", forever, appArmor(runtimeapi.SecurityProfile_Localhost, silentProfile))
	check(t, p.stop(silent, 100))
	p.wantExit(silent, 137, "Error")
	// The profile forbids what the capabilities would allow.
	admin := secure(func(s *runtimeapi.LinuxContainerSecurityContext) {
		s.Capabilities = &runtimeapi.Capability{AddCapabilities: []string{"SYS_ADMIN"}}
	})
	p.exec(p.run("admin", forever, admin), "! mount -t tmpfs x /tmp 2>/dev/null")
	p.exec(p.run("free", forever, admin, appArmor(runtimeapi.SecurityProfile_Unconfined, "")), "mount -t tmpfs x /tmp")
}

const testProfile, silentProfile = "minicri-test-profile", "minicri-silent-profile"

func loadTestProfile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "profile")
	const form = "profile %s flags=(attach_disconnected) {\n  file,\n  capability,\n  network,\n  ptrace,%s\n}\n"
	check(t, os.WriteFile(path, fmt.Appendf(nil, form+form, testProfile, " signal,", silentProfile, ""), 0o600))
	program(t, "apparmor_parser", "-Kr", path)
	t.Cleanup(func() { program(t, "apparmor_parser", "-KR", path) })
}

const unit = "minicri.service"

func systemctl(t *testing.T, arguments ...string) string {
	t.Helper()
	output, err := exec.Command("systemctl", arguments...).CombinedOutput()
	if err != nil {
		journal, _ := exec.Command("journalctl", "--no-pager", "--lines", "30", "--unit", unit).CombinedOutput()
		t.Fatalf("systemctl %v: %v: %s\n%s", arguments, err, output, journal)
	}
	return strings.TrimSpace(string(output))
}

// program runs one of the node, which has to succeed, and returns what it says.
func program(t testing.TB, name string, arguments ...string) string {
	output, err := exec.Command(name, arguments...).CombinedOutput()
	harness.Need(t, err == nil, "%s %q: %v: %s", name, arguments, err, output)
	return strings.TrimSpace(string(output))
}

// TestUnit is a node's life as its owner sees it, by the commands of docs/node.md, with what make install has
// installed: the unit, the configuration, the binaries and the plugins.
func TestUnit(t *testing.T) {
	configure(t, "[runtimes.runc]\ntype = \"builtin\"\n[nri]\nenabled = true\n")
	importBusybox(t) // also before the daemon runs: docs/kind.md
	systemctl(t, "daemon-reload")
	systemctl(t, "enable", "--now", "minicri") // returns when the daemon says READY=1
	same(t, "state", property(t, unit, "ActiveState"), "active")
	program(t, "minicri", "check")
	p := unitPod(t, "runc")
	id := p.run("app", forever)
	path := p.info(id).CgroupsPath
	same(t, "slice", filepath.Dir(path), "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0815.slice")
	stays := func(when string, do func()) {
		pod, old := p.kept(id), property(t, unit, "MainPID")
		do()
		p.connect()
		expect(t, property(t, unit, "MainPID") != old, "%s: it is still process %s", when, old)
		same(t, when, property(t, unit, "ActiveState"), "active")
		p.wantKept(id, pod)
	}
	stays("restart", func() { systemctl(t, "restart", unit) })
	stays("kill", func() {
		systemctl(t, "kill", "--kill-whom", "main", "--signal", "KILL", unit)
		harness.Eventually(t, "systemd starts it again", func() bool {
			return property(t, unit, "NRestarts") == "1" && property(t, unit, "ActiveState") == "active"
		})
	})
	stays("stop and start", func() {
		systemctl(t, "stop", unit)
		systemctl(t, "start", unit)
	})
	program(t, "minicri", "check")
	program(t, "../../bin/crictl", "rmp", "-fa")
	systemctl(t, "disable", "--now", "minicri")
	same(t, "state", property(t, unit, "ActiveState"), "inactive")
	program(t, "minicri", "check", "--fix")
	harness.Eventually(t, "systemd has forgotten all scopes", func() bool {
		return systemctl(t, "list-units", "--all", "--plain", "--no-legend", "cri-containerd-*.scope") == ""
	})
	left, err := filepath.Glob("/sys/fs/cgroup/kubepods.slice/*/*/*.scope")
	expect(t, err == nil && len(left) == 0, "left behind: %v, %v", left, err)
	procs, _ := os.ReadFile("/sys/fs/cgroup/system.slice/" + unit + "/cgroup.procs") // it is gone
	same(t, "processes of the unit that are left behind", string(procs), "")
	systemctl(t, "stop", "kubepods.slice")
	program(t, "make", "-s", "-C", "../..", "uninstall")
	t.Cleanup(func() { program(t, "cp", "-a", "../../bin/test/installed/.", "/") })
	for path, stays := range harness.Sorted(map[string]bool{
		"/usr/local/bin/minicri": false, "/usr/local/bin/minicri-shim": false, "/usr/local/lib/systemd/system/" + unit: false,
		"/usr/local/lib/minicri": false, "/etc/crictl.yaml": false, "/etc/minicri/config.toml": false,
		"/etc/minicri/config.toml.d/10-test.toml": true,
	}) {
		_, err := os.Stat(path)
		same(t, "make uninstall: there is "+path, err == nil, stays)
	}
	program(t, "rm", "-rf", "/var/lib/minicri", "/etc/minicri", "/var/lib/cni/networks/minicri")
	program(t, "ip", "link", "delete", "minicri0")
}

func unitPod(t *testing.T, handler string) *pod {
	p := &pod{Node: &nodetest.Node{}, t: t}
	p.connect()
	answer := nodetest.Call(t, p.Runtime.RuntimeConfig, &runtimeapi.RuntimeConfigRequest{})
	same(t, "driver that the kubelet is told", answer.GetLinux().GetCgroupDriver(), runtimeapi.CgroupDriver_SYSTEMD)
	p.config = &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Uid: "0815", Namespace: "test"}, LogDirectory: t.TempDir(),
		Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0815.slice"},
	}
	pod := nodetest.Call(t, p.Runtime.RunPodSandbox, &runtimeapi.RunPodSandboxRequest{Config: p.config, RuntimeHandler: handler})
	p.id = pod.PodSandboxId
	return p
}

// connect makes clients of the unit's daemon: one that lost it waits before it tries again.
func (p *pod) connect() {
	conn, err := grpc.NewClient("unix:///run/minicri/minicri.sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(p.t, err)
	p.t.Cleanup(func() { conn.Close() })
	p.Runtime = runtimeapi.NewRuntimeServiceClient(conn)
	p.Image = runtimeapi.NewImageServiceClient(conn)
}

func (p *pod) removeAll() {
	check(p.t, p.stopPod())
	check(p.t, p.removePod())
}

// importBusybox imports the image of all containers, as docker save writes it.
func importBusybox(t *testing.T) {
	const script = `cd "$2" && mkdir -p root/bin root/tmp && cp /bin/busybox root/bin && for name in sh sleep echo; do ln -s busybox root/bin/$name; done
		tar -C root -cf layer.tar . && sum=$(sha256sum layer.tar)
		printf '{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' "${sum%% *}" >config.json
		printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$1" >manifest.json
		tar -cf image.tar manifest.json config.json layer.tar`
	dir := t.TempDir()
	program(t, "sh", "-euc", script, "sh", shell("", "").Image.Image, dir)
	program(t, "minicri", "image", "import", filepath.Join(dir, "image.tar"))
}

// configure writes the drop-in of the installed configuration: a network, and what the test wants before that.
func configure(t *testing.T, keys string) {
	const dir = "/etc/minicri/config.toml.d"
	check(t, os.MkdirAll(dir, 0o755))
	content := keys + "[default_network]\nenabled = true\nsubnet = \"10.99.0.0/16\"\nmasquerade = false\n"
	check(t, os.WriteFile(dir+"/10-test.toml", []byte(content), 0o600))
}

func logged(t *testing.T) string {
	return program(t, "journalctl", "--no-pager", "--output", "cat", "_PID="+property(t, unit, "MainPID"))
}

// kept are the processes of a pod's pause and container, which stay what they are.
func (p *pod) kept(id string) string {
	return fmt.Sprintf("pause %d, container %d", p.pausePID(), p.info(id).PID)
}

func (p *pod) wantKept(id, before string) {
	same(p.t, "processes of the pod", p.kept(id), before)
	same(p.t, "state", p.status(id).State, running)
	same(p.t, "exec", p.exec(id, "echo hi"), "hi")
}

func startUnit(t *testing.T) (p *pod, id string) {
	configure(t, "")
	systemctl(t, "daemon-reload")
	systemctl(t, "start", unit)
	importBusybox(t)
	p = unitPod(t, "")
	return p, p.run("app", forever)
}

// TestUnitReload: the owner of a node changes its configuration and tells systemd.
// The daemon says to systemd when it begins and when it is done (sd_notify(3)).
func TestUnitReload(t *testing.T) {
	p, id := startUnit(t)
	before, daemon := p.kept(id), property(t, unit, "MainPID")
	const call = "level=DEBUG msg=call method=ContainerStatus"
	expect(t, !strings.Contains(logged(t), call), "calls are in the log already")
	configure(t, "log_level = \"debug\"\n")
	systemctl(t, "reload", unit)
	// Once by the signal, and once because the file has changed.
	const reloaded = "configuration reloaded"
	harness.Eventually(t, "both reloads are logged", func() bool { return strings.Count(logged(t), reloaded) == 2 })
	harness.Eventually(t, "a call is logged", func() bool { p.status(id); return strings.Contains(logged(t), call) })
	expect(t, strings.Contains(logged(t), "applied=[log_level]"), "the log does not say what was applied:\n%s", logged(t))
	// By a signal alone, so that it is the daemon by whom systemd knows.
	changed := property(t, unit, "StateChangeTimestampMonotonic")
	systemctl(t, "kill", "--kill-whom", "main", "--signal", "HUP", unit)
	harness.Eventually(t, "systemd sees the unit reload, and active again", func() bool {
		return property(t, unit, "StateChangeTimestampMonotonic") != changed && property(t, unit, "ActiveState") == "active"
	})
	// What cannot be read changes nothing.
	configure(t, "log_level = \"loud\"\n")
	systemctl(t, "reload", unit)
	harness.Eventually(t, "the error is logged", func() bool { return strings.Contains(logged(t), "it stays as it was") })
	harness.Eventually(t, "the unit is active", func() bool { return property(t, unit, "ActiveState") == "active" })
	p.wantKept(id, before)
	same(t, "daemon after all", property(t, unit, "MainPID"), daemon)
	configure(t, "")
	p.removeAll()
	systemctl(t, "stop", unit)
}

// TestUnitWatchdog: a lock that is never given back ends the pings; systemd starts
// the daemon again, and no pod notices.
func TestUnitWatchdog(t *testing.T) {
	const points = "/run/minicri-failpoints"
	daemon, err := filepath.Abs("../../bin/failpoints/minicri")
	check(t, err)
	const dropIn = "/run/systemd/system/" + unit + ".d/10-test.conf"
	check(t, os.MkdirAll(filepath.Dir(dropIn), 0o755))
	content := "[Service]\nExecStart=\nExecStart=" + daemon + "\nEnvironment=MINICRI_FAILPOINTS=" + points + "\nWatchdogSec=20\n"
	check(t, os.WriteFile(dropIn, []byte(content), 0o600))
	t.Cleanup(func() {
		check(t, os.RemoveAll(filepath.Dir(dropIn)))
		systemctl(t, "daemon-reload")
	})
	p, id := startUnit(t)
	before, restarts := p.kept(id), property(t, unit, "NRestarts")

	check(t, os.WriteFile(points, []byte("lock pod sandbox\thang\n"), 0o600))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	other := &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "wedges", Uid: "0816", Namespace: "test"}, LogDirectory: t.TempDir(), Linux: p.config.Linux}
	client := p.Runtime
	go client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: other})
	harness.Eventually(t, "systemd ends the daemon and starts it again", func() bool {
		return property(t, unit, "NRestarts") != restarts && property(t, unit, "ActiveState") == "active"
	})
	check(t, os.Remove(points))
	said := program(t, "journalctl", "--no-pager", "--output", "cat", "--unit", unit)
	for _, words := range []string{"Watchdog timeout", "probe=pods"} {
		expect(t, strings.Contains(said, words), "the journal does not say %q:\n%s", words, said)
	}
	p.connect()
	p.wantKept(id, before)
	answer := nodetest.Call(t, p.Runtime.RunPodSandbox, &runtimeapi.RunPodSandboxRequest{Config: other})
	p.removeAll()
	p.id = answer.PodSandboxId
	p.removeAll()
	systemctl(t, "stop", unit)
}
