//go:build vm

package container

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

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
