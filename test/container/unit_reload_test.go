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

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// configure writes the drop-in of the installed configuration: a network, and what
// the test wants before that.
func configure(t *testing.T, keys string) {
	t.Helper()
	const dir = "/etc/minicri/config.toml.d"
	check(t, os.MkdirAll(dir, 0o755))
	content := keys + "[default_network]\nenabled = true\nsubnet = \"10.99.0.0/16\"\nmasquerade = false\n"
	check(t, os.WriteFile(dir+"/10-test.toml", []byte(content), 0o600))
}

// logged is what the daemon that runs now has logged.
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

// TestUnitReload: the owner of a node changes its configuration and tells systemd.
// The daemon says to systemd when it begins and when it is done (sd_notify(3)).
func TestUnitReload(t *testing.T) {
	configure(t, "")
	systemctl(t, "daemon-reload")
	systemctl(t, "start", unit)
	importImage(t)
	p := unitPod(t, "")
	id := p.run("app", forever)
	before := p.processes(t, id)
	const call = "level=DEBUG msg=call method=ContainerStatus"
	if strings.Contains(logged(t), call) {
		t.Error("calls are in the log already")
	}
	configure(t, "log_level = \"debug\"\n")
	systemctl(t, "reload", unit)
	// Once by the signal, and once because the file has changed.
	const reloaded = "configuration reloaded"
	eventually(t, "both reloads are logged", func() bool { return strings.Count(logged(t), reloaded) == 2 })
	eventually(t, "a call is logged", func() bool { p.status(id); return strings.Contains(logged(t), call) })
	if !strings.Contains(logged(t), "applied=[log_level]") {
		t.Errorf("the log does not say what was applied:\n%s", logged(t))
	}
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
	configure(t, "")
	systemctl(t, "daemon-reload")
	systemctl(t, "start", unit)
	importImage(t)
	p := unitPod(t, "")
	id := p.run("app", forever)
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
		if !strings.Contains(string(said), words) {
			t.Errorf("the journal does not say %q:\n%s", words, said)
		}
	}
	p.connect()
	if p.pausePID() != pause || p.info(id).PID != pid || p.status(id).State != running {
		t.Errorf("pause was %d, is %d; the container was %d, is %d", pause, p.pausePID(), pid, p.info(id).PID)
	}
	same(t, "exec", p.exec(id, "echo hi"), "hi")
	answer, err := p.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: other})
	check(t, err)
	p.removeAll()
	p.id = answer.PodSandboxId
	p.removeAll()
	systemctl(t, "stop", unit)
}
