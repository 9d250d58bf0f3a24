package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// readyTime is within what NetworkReady has to follow the configuration: a few of the
// daemon's own periods, which are seconds, and not the minute in which it would be
// found by chance.
const readyTime = 30 * time.Second

func becomesReady(t *testing.T, n *harness.Node, want bool) {
	t.Helper()
	eventually(t, "NetworkReady follows", readyTime, func() bool {
		got, _ := networkReady(t, n)
		return got == want
	})
}

// The file of the network that is in use stays in use as it was while it is
// half written: no pod lands on another network.
func TestProperty20_HalfWrittenFileThatWasInUse(t *testing.T) {
	n := newNode(t)
	path := n.WriteNetwork()
	whole, err := os.ReadFile(path)
	check(t, err)
	other := strings.Replace(string(whole), `"name": "`+n.Network, `"name": "podman`, 1)
	check(t, os.WriteFile(filepath.Join(n.CNIConf, "87-podman.conflist"), []byte(other), 0o644))
	becomesNetwork(t, n, n.Network)
	check(t, os.WriteFile(path, whole[:len(whole)/2], 0o644))
	eventually(t, "the file is shown as broken", readyTime, func() bool { return strings.Contains(statusInfo(t, n)["networkProblems"], path) })
	becomesReady(t, n, true)
	becomesNetwork(t, n, n.Network)
	n.RemovePod(n.RunPod(n.PodConfig("case")))
	check(t, os.WriteFile(path, whole, 0o644))
	eventually(t, "the file is whole", readyTime, func() bool { return !strings.Contains(statusInfo(t, n)["networkProblems"], path) })
	check(t, os.Remove(filepath.Join(n.CNIConf, "87-podman.conflist")))
}

// ConfigMaps are mounted so: FILE -> ..data/FILE, ..data -> ..VERSION.
func TestProperty20_SymlinkSwitched(t *testing.T) {
	n := newNode(t)
	path := n.WriteNetwork()
	whole, err := os.ReadFile(path)
	check(t, err)
	check(t, os.Remove(path))
	for _, version := range []string{"..v1", "..v2"} {
		check(t, os.Mkdir(filepath.Join(n.CNIConf, version), 0o755))
		text := strings.Replace(string(whole), `"name": "`+n.Network, `"name": "`+n.Network+strings.Trim(version, "."), 1)
		check(t, os.WriteFile(filepath.Join(n.CNIConf, version, "10-test.conflist"), []byte(text), 0o644))
	}
	data := filepath.Join(n.CNIConf, "..data")
	check(t, os.Symlink("..v1", data))
	check(t, os.Symlink("..data/10-test.conflist", path))
	becomesNetwork(t, n, n.Network+"v1")
	check(t, os.Symlink("..v2", data+"_new"))
	check(t, os.Rename(data+"_new", data))
	becomesNetwork(t, n, n.Network+"v2")
	becomesReady(t, n, true)
}

func becomesNetwork(t *testing.T, n *harness.Node, name string) {
	t.Helper()
	eventually(t, "the network is "+name, readyTime, func() bool {
		return strings.Contains(currentNetwork(t, n), `"`+name+`"`)
	})
}

// Files come by rename, half written at first, and go with their directory, also over a
// start; bad ones hide no good one.
func TestProperty20_FilesThatComeAndGo(t *testing.T) {
	n := newNode(t, harness.NoNetwork())
	becomesReady(t, n, false)
	path := n.WriteNetwork()
	becomesReady(t, n, true)
	whole, err := os.ReadFile(path)
	check(t, err)
	check(t, os.Rename(path, path+".off"))
	becomesReady(t, n, false)
	check(t, os.WriteFile(path, whole[:len(whole)/2], 0o644))
	eventually(t, "the message names the file", readyTime, func() bool {
		ready, message := networkReady(t, n)
		return !ready && strings.Contains(message, path)
	})
	check(t, os.Rename(path+".off", path))
	becomesReady(t, n, true)
	for _, restart := range []func(){func() {}, n.Restart} {
		check(t, os.RemoveAll(n.CNIConf))
		restart()
		becomesReady(t, n, false)
		check(t, os.Mkdir(n.CNIConf, 0o755))
		n.WriteNetwork()
		becomesReady(t, n, true)
	}
	bad := filepath.Join(n.CNIConf, "00-bad.conflist")
	check(t, os.WriteFile(bad, []byte(`{"name": `), 0o644))
	check(t, os.WriteFile(filepath.Join(n.CNIConf, "01-empty.conf"), nil, 0o644))
	check(t, os.WriteFile(filepath.Join(n.CNIConf, "02-no-plugins.conflist"), []byte(`{"cniVersion": "1.0.0", "name": "x", "plugins": []}`), 0o644))
	eventually(t, "the bad files are seen", readyTime, func() bool {
		problems := harness.Info[[]string](t, n, "networkProblems")
		return len(problems) == 3 && strings.Contains(problems[0], bad)
	})
	n.RunPod(n.PodConfig("web"))
}

func TestNetworkIsNotReadyWithoutItsPlugins(t *testing.T) {
	n := newNode(t, harness.NoNetwork(), harness.Config(fast))
	r := newRecorder(t, n)
	config := r.plugin("no-such-plugin", nil)
	program := filepath.Join(n.Plugins, "no-such-plugin")
	check(t, os.Rename(program, program+".off"))
	n.WriteConflist("10-test.conflist", config)
	eventually(t, "the message names the plugin", readyTime, func() bool {
		isReady, message := networkReady(t, n)
		return !isReady && strings.Contains(message, "no-such-plugin")
	})
	if _, err := run(t, n, n.PodConfig("web")); err == nil {
		t.Error("a pod ran")
	}
	// What ADD may have begun is rolled back once the plugin is there.
	check(t, os.Rename(program+".off", program))
	eventually(t, "nothing waits for its DEL", patience, func() bool { return len(pending(t, n)) == 0 })
}

// cri: RuntimeCondition.message
func TestProperty21_STATUSThatFails(t *testing.T) {
	n := newNode(t, harness.NoNetwork(), harness.Config(fast))
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"), r.plugin("two", nil))
	becomesReady(t, n, true)
	id := n.RunPod(n.PodConfig("web"))
	r.order("two", "STATUS", "fail 50 backend is away")
	eventually(t, "the message is the plugin's", readyTime, func() bool {
		isReady, message := networkReady(t, n)
		return !isReady && strings.Contains(message, "backend is away") && strings.Contains(message, "50")
	})
	if !ready(t, n, id) {
		t.Error("a pod that runs is not ready any more")
	}
	r.order("two", "STATUS", "")
	becomesReady(t, n, true)
}

// cri: Status
func TestProperty21_STATUSThatHangs(t *testing.T) {
	n := newNode(t, harness.NoNetwork(), harness.Config(fast+`cni_status = "5s"`))
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"), r.plugin("two", nil))
	becomesReady(t, n, true)
	id := n.RunPod(n.PodConfig("web"))
	r.order("two", "STATUS", "hang")
	pids := r.hung()
	wantSoon(t, "Status", pids[0], func() error {
		_, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{})
		return err
	})
	becomesReady(t, n, false)
	for _, pid := range pids {
		eventually(t, "the plugin and its child are gone", patience, func() bool { return !alive(pid) })
	}
	if !ready(t, n, id) {
		t.Error("a pod that runs is not ready any more")
	}
	check(t, remove(t, n, id))
	r.order("two", "STATUS", "")
	becomesReady(t, n, true)
}
