package e2e

import (
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// systemd is the other end of sd_notify(3), as systemd has it.
type systemd struct {
	mu   sync.Mutex
	told []string
}

// newSystemd listens, and returns what a daemon finds in its environment.
func newSystemd(t *testing.T) (s *systemd, socket string) {
	socket = filepath.Join(t.TempDir(), "notify")
	connection, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: socket, Net: "unixgram"})
	check(t, err)
	t.Cleanup(func() { connection.Close() })
	s = &systemd{}
	go func() {
		for buffer := make([]byte, 4096); ; {
			n, err := connection.Read(buffer)
			if err != nil {
				return
			}
			s.mu.Lock()
			s.told = append(s.told, string(buffer[:n]))
			s.mu.Unlock()
		}
	}()
	return s, socket
}

// count is how often something was told.
func (s *systemd) count(text string) (times int) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, told := range s.told {
		if strings.HasPrefix(told, text) {
			times++
		}
	}
	return times
}

// rewrite changes the configuration file of a node, by rename.
func rewrite(t *testing.T, n *nodetest.Node, old, new string) {
	file := filepath.Join(n.Dir, "config.toml")
	data := string(harness.Read(t, file))
	harness.Want(t, strings.Contains(data, old), "the configuration has no %q", old)
	check(t, os.WriteFile(file+".new", []byte(strings.Replace(data, old, new, 1)), 0o600))
	check(t, os.Rename(file+".new", file))
}

// reload changes the configuration of a node, and waits until it is in force.
func reload(t *testing.T, n *nodetest.Node, old, new string) {
	n.Reload(func() { rewrite(t, n, old, new) })
}

// A changed file is in force without a restart and without being asked, systemd is told, what cannot be
// reloaded is named, and a file that cannot be read changes nothing.
func TestReload(t *testing.T) {
	s, socket := newSystemd(t)
	n := newNode(t, nodetest.Env("NOTIFY_SOCKET="+socket), nodetest.LevelOfFile(), nodetest.Config("log_level = 'info'\nshm_size = 65536\n[limits]\nreload = \"20ms\"\ncni_add = \"90s\"\n"))
	first, pid := n.RunPod(n.PodConfig("first")), n.PID()
	inForce := func(limit string) {
		harness.Eventually(t, "the limit is "+limit, func() bool {
			return strings.Contains(fmt.Sprint(nodetest.Info[map[string]any](t, n, "config")["limits"]), "cni_add:"+limit)
		})
	}
	debug := func() int {
		list(t, n, nil)
		return strings.Count(n.Log(), "level=DEBUG msg=call method=ListPodSandbox")
	}
	harness.Want(t, debug() == 0, "a line of level debug is in the log")
	rewrite(t, n, "cni_add = \"90s\"", "cni_add = \"2s\"")
	rewrite(t, n, "'info'\nshm_size = 65536", "'debug'\nshm_size = 131072\nmetrics_address = '127.0.0.1:0'")
	inForce("2s")
	harness.Eventually(t, "the level is reloaded, and the other keys are named", func() bool {
		log := n.Log()
		return debug() > 0 && strings.Contains(log, "need a restart") && strings.Contains(log, "shm_size") && strings.Contains(log, "metrics_address")
	})
	harness.Eventually(t, "systemd is told of the reload and of its end", func() bool { return s.count("RELOADING=1\nMONOTONIC_USEC=") > 0 && s.count("READY=1") > 1 })
	// SIGHUP asks for it too, as often as it comes.
	for range 50 {
		check(t, syscall.Kill(pid, syscall.SIGHUP))
		check(t, syscall.Kill(pid, syscall.SIGUSR1))
	}
	rewrite(t, n, "cni_add = \"2s\"", "cni_add = \"soon\"")
	check(t, syscall.Kill(pid, syscall.SIGHUP))
	harness.Eventually(t, "the error is logged", func() bool { return strings.Contains(n.Log(), "stays as it was") })
	harness.Want(t, n.PID() == pid && ready(t, n, first), "the daemon was restarted, or the pod has ended")
	rewrite(t, n, "'debug'", "'warn'")
	rewrite(t, n, "cni_add = \"soon\"", "cni_add = \"3s\"")
	inForce("3s")
	harness.Eventually(t, "no line of level debug comes", func() bool { before := debug(); return debug() == before })
	n.Stop()
	harness.Eventually(t, "systemd is told of the end", func() bool { return s.count("STOPPING=1") > 0 })
	rewrite(t, n, "\nmetrics_address = '127.0.0.1:0'", "") // the socket of a daemon that starts now is no leak
}

// Each kind of key that is reloaded has its effect: images, the default network, NRI.
func TestReloadOfEachTable(t *testing.T) {
	dir := t.TempDir()
	n := newNode(t, nodetest.NoNetwork(), nodetest.Config(fmt.Sprintf(`[limits]
reload = "20ms"
[images]
certs_dirs = ['%[1]s/before']
pinned = []
[nri]
enabled = true
socket = '%[1]s/nri.sock'
plugin_dir = '%[1]s/plugins'
config_dir = '%[1]s/conf'
required_plugins = []
`, dir)))
	n.ImportBusybox()
	reload(t, n, "pinned = []", "pinned = ['"+nodetest.BusyboxImage+"']")
	images := nodetest.Call(t, n.Image.ListImages, &runtimeapi.ListImagesRequest{})
	harness.Want(t, len(images.Images) == 1 && images.Images[0].Pinned, "images: %v", images.Images)

	// A pull asks where the directories of registries lead by now.
	check(t, os.MkdirAll(filepath.Join(dir, "after", "nowhere.invalid"), 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "after", "nowhere.invalid", "hosts.toml"), []byte("server = 'http://127.0.0.1:1'\n"), 0o600))
	reload(t, n, dir+"/before", dir+"/after")
	_, err := n.Image.PullImage(harness.Limited(t), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: "nowhere.invalid/app:1"}})
	harness.Want(t, err != nil && strings.Contains(err.Error(), "127.0.0.1:1"), "a pull by the new directories: %v", err)

	// A drop-in is followed like the file itself.
	check(t, os.Mkdir(filepath.Join(n.Dir, "config.toml.d"), 0o755))
	check(t, os.WriteFile(filepath.Join(n.Dir, "config.toml.d", "network.toml"), fmt.Appendf(nil,
		"[default_network]\nenabled = true\nname = %q\nbridge = %q\nsubnet = '10.77.0.0/24'\ndata_dir = %q\n", n.Network, n.Bridge, filepath.Dir(n.Addresses)), 0o600))
	becomesReady(t, n, true)
	harness.Eventually(t, "the drop-in is in force", func() bool { return strings.Contains(n.Log(), `applied="[default_network`) })
	id := n.RunPod(n.PodConfig("web"))

	reload(t, n, "required_plugins = []", "required_plugins = ['absent']")
	wantRefused(t, n, n.PodConfig("refused"), "required NRI plugin absent")
	reload(t, n, "required_plugins = ['absent']", "required_plugins = []")
	n.RunPod(n.PodConfig("refused"))
	reload(t, n, dir+"/nri.sock", dir+"/other.sock")
	_, err = os.Stat(dir + "/other.sock")
	harness.Want(t, err == nil && ready(t, n, id), "plugins cannot connect at the other socket, or the pod has ended: %v", err)
}

// A runtime handler that is added runs containers; one that is removed is refused, and the pods that it has
// are stopped and removed as before.
func TestReloadOfRuntimes(t *testing.T) {
	n := newNode(t, nodetest.Config(fast))
	n.ImportBusybox()
	runc, err := filepath.Abs("../../bin/debian/usr/sbin/runc")
	check(t, err)
	pod := func(name string) (string, error) { return runBy(t, n, n.PodConfig(name), "late") }
	handlers := func() (names string) {
		for _, h := range nodetest.Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{}).RuntimeHandlers {
			names += h.Name + " "
		}
		return names
	}
	_, err = pod("early")
	nodetest.WantCode(t, err, codes.InvalidArgument)

	table := fmt.Sprintf("[runtimes.late]\ntype = 'oci'\npath = '%s'\n", runc)
	rewrite(t, n, "[limits]", table+"[limits]")
	harness.Eventually(t, "the handler is there", func() bool { return strings.Contains(handlers(), "late") })
	id, err := pod("web")
	check(t, err)
	n.RunContainer(id, n.PodConfig("web"), nodetest.Container("app", "/bin/sleep", "1000000"))

	rewrite(t, n, table, "")
	harness.Eventually(t, "the handler is gone", func() bool { return !strings.Contains(handlers(), "late") })
	_, err = pod("refused")
	nodetest.WantCode(t, err, codes.InvalidArgument)
	harness.Want(t, ready(t, n, id), "the pod of the handler is not ready any more")
	n.RemovePod(id)
}

// Limits that were long enough for every plugin count at once when they are shorter: those of calls, of ADD and DEL,
// and of how long a pod's deletion is blocked.
func TestReloadOfLimits(t *testing.T) {
	limits := map[string]string{
		"run": "'20m'", "destroy": "'20m'", "kill": "'20m'", "cni_add": "'10m'", "cni_del": "'10m'",
		"detach_tries": "1000", "detach_time": "'10h'", "retry_first": "'200ms'", "retry_most": "'200ms'", "reload": "'20ms'",
	}
	text := "[limits]\n"
	for key, value := range limits {
		text += key + " = " + value + "\n"
	}
	n, r := newRecorded(t, text)
	set := func(key, value string) {
		reload(t, n, key+" = "+limits[key]+"\n", key+" = "+value+"\n")
		limits[key] = value
	}
	id := n.RunPod(n.PodConfig("web"))

	set("cni_add", "'1s'")
	r.order("one", "ADD", "hang")
	wantRefused(t, n, n.PodConfig("hangs"), "not done after 1s")
	set("run", "'1s'") // which begins before the limit of its ADD
	wantRefused(t, n, n.PodConfig("hangs"), "not done within 1s")
	r.order("one", "ADD", "")

	r.order("one", "DEL", "hang")
	set("cni_del", "'1s'")
	harness.WantError(t, stop(t, n, id), "not done after 1s")
	set("kill", "'1s'")
	set("destroy", "'1s'")
	harness.WantError(t, stop(t, n, id), "not done within 1s")
	r.order("one", "DEL", "fail 11 not now")
	for _, key := range []string{"destroy", "kill", "cni_del"} {
		set(key, "'10m'")
	}
	set("detach_tries", "1")
	harness.Eventually(t, "the deletion is not blocked", func() bool { return stop(t, n, id) == nil })
	r.order("one", "DEL", "")
	harness.Eventually(t, "the addresses are free", func() bool { return len(addresses(t, n)) == 0 })
}
