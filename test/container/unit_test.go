//go:build vm

package container

import (
	"context"
	"encoding/json"
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

func runProgram(t *testing.T, name string, arguments ...string) {
	t.Helper()
	if output, err := exec.Command(name, arguments...).CombinedOutput(); err != nil {
		t.Errorf("%s %s: %v: %s", name, strings.Join(arguments, " "), err, output)
	}
}

// TestUnit is a node's life as its owner sees it, by the commands of docs/node.md,
// with what make install has installed: the unit, the configuration, the binaries
// and the plugins.
func TestUnit(t *testing.T) {
	configure(t, "[runtimes.runc]\ntype = \"builtin\"\n[nri]\nenabled = true\n")
	importImage(t) // also before the daemon runs: docs/kind.md
	systemctl(t, "daemon-reload")
	systemctl(t, "enable", "--now", "minicri") // returns when the daemon says READY=1
	same(t, "state", property(t, unit, "ActiveState"), "active")
	runProgram(t, "minicri", "check")
	p := unitPod(t, "runc")
	id := p.run("app", forever)
	path := p.info(id).CgroupsPath
	same(t, "slice", filepath.Dir(path), "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0815.slice")
	stays := func(when string, do func()) {
		t.Helper()
		pause, pid, old := p.pausePID(), p.info(id).PID, property(t, unit, "MainPID")
		do()
		p.connect()
		if property(t, unit, "MainPID") == old || property(t, unit, "ActiveState") != "active" {
			t.Errorf("%s: it is still process %s, %s", when, old, property(t, unit, "ActiveState"))
		}
		if p.pausePID() != pause || p.info(id).PID != pid || p.status(id).State != running {
			t.Errorf("%s: pause was %d, is %d; the container was %d, is %d", when, pause, p.pausePID(), pid, p.info(id).PID)
		}
		same(t, when+": exec", p.exec(id, "echo hi"), "hi")
	}
	stays("restart", func() { systemctl(t, "restart", unit) })
	stays("kill", func() {
		systemctl(t, "kill", "--kill-whom", "main", "--signal", "KILL", unit)
		eventually(t, "systemd starts it again", func() bool {
			return property(t, unit, "NRestarts") == "1" && property(t, unit, "ActiveState") == "active"
		})
	})
	stays("stop and start", func() {
		systemctl(t, "stop", unit)
		systemctl(t, "start", unit)
	})
	runProgram(t, "minicri", "check")
	runProgram(t, "../../bin/crictl", "rmp", "-fa")
	systemctl(t, "disable", "--now", "minicri")
	same(t, "state", property(t, unit, "ActiveState"), "inactive")
	runProgram(t, "minicri", "check", "--fix")
	eventually(t, "systemd has forgotten all scopes", func() bool {
		return systemctl(t, "list-units", "--all", "--plain", "--no-legend", "minicri-*.scope") == ""
	})
	left, err := filepath.Glob("/sys/fs/cgroup/kubepods.slice/*/*/*.scope")
	expect(t, err == nil && len(left) == 0, "left behind: %v, %v", left, err)
	if procs, err := os.ReadFile("/sys/fs/cgroup/system.slice/" + unit + "/cgroup.procs"); err == nil && len(procs) > 0 {
		t.Errorf("processes of the unit are left behind: %s", procs)
	}
	systemctl(t, "stop", "kubepods.slice")
	runProgram(t, "make", "-s", "-C", "../..", "uninstall")
	t.Cleanup(func() { runProgram(t, "cp", "-a", "../../bin/test/installed/.", "/") })
	for path, stays := range map[string]bool{
		"/usr/local/bin/minicri": false, "/usr/local/bin/minicri-shim": false, "/usr/local/lib/systemd/system/" + unit: false,
		"/usr/local/lib/minicri": false, "/etc/crictl.yaml": false, "/etc/minicri/config.toml": false,
		"/etc/minicri/config.toml.d/10-test.toml": true,
	} {
		if _, err := os.Stat(path); (err == nil) != stays {
			t.Errorf("make uninstall: %s: %v", path, err)
		}
	}
}

func importImage(t *testing.T) {
	t.Helper()
	runProgram(t, "minicri", "image", "import", busyboxArchive(t))
}

func unitPod(t *testing.T, handler string) *pod {
	t.Helper()
	p := &pod{Node: &harness.Node{}, t: t}
	p.connect()
	answer := harness.Call(t, p.Runtime.RuntimeConfig, &runtimeapi.RuntimeConfigRequest{})
	same(t, "driver that the kubelet is told", answer.GetLinux().GetCgroupDriver(), runtimeapi.CgroupDriver_SYSTEMD)
	p.config = &runtimeapi.PodSandboxConfig{
		Metadata:     &runtimeapi.PodSandboxMetadata{Name: "web", Uid: "0815", Namespace: "test"},
		LogDirectory: t.TempDir(),
		Linux:        &runtimeapi.LinuxPodSandboxConfig{CgroupParent: "/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod0815.slice"},
	}
	pod := harness.Call(t, p.Runtime.RunPodSandbox, &runtimeapi.RunPodSandboxRequest{Config: p.config, RuntimeHandler: handler})
	p.id = pod.PodSandboxId
	return p
}

// connect makes clients of the unit's daemon: one that lost it waits before it
// tries again.
func (p *pod) connect() {
	p.t.Helper()
	conn, err := grpc.NewClient("unix:///run/minicri/minicri.sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(p.t, err)
	p.t.Cleanup(func() { conn.Close() })
	p.Runtime = runtimeapi.NewRuntimeServiceClient(conn)
	p.Image = runtimeapi.NewImageServiceClient(conn)
}

func (p *pod) removeAll() {
	p.t.Helper()
	check(p.t, p.stopPod())
	check(p.t, p.removePod())
}

// busyboxArchive makes the image of all containers, as docker save writes it.
func busyboxArchive(t *testing.T) string {
	t.Helper()
	const script = `mkdir -p root/bin root/tmp && cp /bin/busybox root/bin && for name in sh sleep echo; do ln -s busybox root/bin/$name; done
		tar -C root -cf layer.tar . && sum=$(sha256sum layer.tar)
		printf '{"architecture":"amd64","os":"linux","rootfs":{"type":"layers","diff_ids":["sha256:%s"]}}' "${sum%% *}" >config.json
		printf '[{"Config":"config.json","RepoTags":["%s"],"Layers":["layer.tar"]}]' "$1" >manifest.json
		tar -cf image.tar manifest.json config.json layer.tar`
	command := exec.Command("sh", "-euc", script, "sh", shell("", "").Image.Image)
	command.Dir = t.TempDir()
	if output, err := command.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	return filepath.Join(command.Dir, "image.tar")
}

// pausePID is the process id of the pod's pause; tests of the unit and of AppArmor ask for it.
func (p *pod) pausePID() int {
	p.t.Helper()
	answer := harness.Call(p.t, p.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: p.id, Verbose: true})
	var info struct {
		PID int `json:"pid"`
	}
	check(p.t, json.Unmarshal([]byte(answer.Info["info"]), &info))
	return info.PID
}

// configure writes the drop-in of the installed configuration: a network, and what
// the test wants before that.
func configure(t *testing.T, keys string) {
	t.Helper()
	const dir = "/etc/minicri/config.toml.d"
	check(t, os.MkdirAll(dir, 0o755))
	content := keys + "[default_network]\nenabled = true\nsubnet = \"10.99.0.0/16\"\nmasquerade = false\n"
	check(t, os.WriteFile(dir+"/10-test.toml", []byte(content), 0o600))
}

func logged(t *testing.T) string {
	t.Helper()
	output, err := exec.Command("journalctl", "--no-pager", "--output", "cat", "_PID="+property(t, unit, "MainPID")).Output()
	check(t, err)
	return string(output)
}

// processes are those of the daemon and of a pod's pause and container, which stay
// what they are.
func (p *pod) processes(t *testing.T, id string) string {
	t.Helper()
	return fmt.Sprintf("daemon %s, pause %d, container %d", property(t, unit, "MainPID"), p.pausePID(), p.info(id).PID)
}

func startUnit(t *testing.T) (p *pod, id string) {
	t.Helper()
	configure(t, "")
	systemctl(t, "daemon-reload")
	systemctl(t, "start", unit)
	importImage(t)
	p = unitPod(t, "")
	return p, p.run("app", forever)
}

// TestUnitReload: the owner of a node changes its configuration and tells systemd.
// The daemon says to systemd when it begins and when it is done (sd_notify(3)).
func TestUnitReload(t *testing.T) {
	p, id := startUnit(t)
	before := p.processes(t, id)
	const call = "level=DEBUG msg=call method=ContainerStatus"
	expect(t, !strings.Contains(logged(t), call), "calls are in the log already")
	configure(t, "log_level = \"debug\"\n")
	systemctl(t, "reload", unit)
	// Once by the signal, and once because the file has changed.
	const reloaded = "configuration reloaded"
	eventually(t, "both reloads are logged", func() bool { return strings.Count(logged(t), reloaded) == 2 })
	eventually(t, "a call is logged", func() bool { p.status(id); return strings.Contains(logged(t), call) })
	expect(t, strings.Contains(logged(t), "applied=[log_level]"), "the log does not say what was applied:\n%s", logged(t))
	// By a signal alone, so that it is the daemon by whom systemd knows.
	changed := property(t, unit, "StateChangeTimestampMonotonic")
	systemctl(t, "kill", "--kill-whom", "main", "--signal", "HUP", unit)
	eventually(t, "systemd sees the unit reload, and active again", func() bool {
		return property(t, unit, "StateChangeTimestampMonotonic") != changed && property(t, unit, "ActiveState") == "active"
	})
	// What cannot be read changes nothing.
	configure(t, "log_level = \"loud\"\n")
	systemctl(t, "reload", unit)
	eventually(t, "the error is logged", func() bool { return strings.Contains(logged(t), "it stays as it was") })
	eventually(t, "the unit is active", func() bool { return property(t, unit, "ActiveState") == "active" })
	same(t, "processes after all", p.processes(t, id), before)
	same(t, "exec", p.exec(id, "echo hi"), "hi")
	configure(t, "")
	p.removeAll()
	systemctl(t, "stop", unit)
}

// TestUnitWatchdog: a lock that is never given back ends the pings; systemd starts
// the daemon again, and no pod notices.
func TestUnitWatchdog(t *testing.T) {
	const points = "/run/minicri-failpoints"
	program, err := filepath.Abs("../../bin/failpoints/minicri")
	check(t, err)
	const dropIn = "/run/systemd/system/" + unit + ".d/10-test.conf"
	check(t, os.MkdirAll(filepath.Dir(dropIn), 0o755))
	content := "[Service]\nExecStart=\nExecStart=" + program + "\nEnvironment=MINICRI_FAILPOINTS=" + points + "\nWatchdogSec=20\n"
	check(t, os.WriteFile(dropIn, []byte(content), 0o600))
	t.Cleanup(func() {
		check(t, os.RemoveAll(filepath.Dir(dropIn)))
		systemctl(t, "daemon-reload")
	})
	p, id := startUnit(t)
	pause, pid, restarts := p.pausePID(), p.info(id).PID, property(t, unit, "NRestarts")

	check(t, os.WriteFile(points, []byte("lock pod sandbox\thang\n"), 0o600))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	other := &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "wedges", Uid: "0816", Namespace: "test"}, LogDirectory: t.TempDir(), Linux: p.config.Linux}
	client := p.Runtime
	go client.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: other})
	eventually(t, "systemd ends the daemon and starts it again", func() bool {
		return property(t, unit, "NRestarts") != restarts && property(t, unit, "ActiveState") == "active"
	})
	check(t, os.Remove(points))
	said, err := exec.Command("journalctl", "--no-pager", "--output", "cat", "--unit", unit).Output()
	check(t, err)
	for _, words := range []string{"Watchdog timeout", "probe=pods"} {
		expect(t, strings.Contains(string(said), words), "the journal does not say %q:\n%s", words, said)
	}
	p.connect()
	if p.pausePID() != pause || p.info(id).PID != pid || p.status(id).State != running {
		t.Errorf("pause was %d, is %d; the container was %d, is %d", pause, p.pausePID(), pid, p.info(id).PID)
	}
	same(t, "exec", p.exec(id, "echo hi"), "hi")
	answer := harness.Call(t, p.Runtime.RunPodSandbox, &runtimeapi.RunPodSandboxRequest{Config: other})
	p.removeAll()
	p.id = answer.PodSandboxId
	p.removeAll()
	systemctl(t, "stop", unit)
}
