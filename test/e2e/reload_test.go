package e2e

import (
	"context"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// systemd is the other end of sd_notify(3), as systemd has it.
type systemd struct {
	mu   sync.Mutex
	told []string
	at   []time.Time
}

// newSystemd listens, and returns what a daemon finds in its environment.
func newSystemd(t *testing.T) (s *systemd, socket string) {
	t.Helper()
	dir, err := os.MkdirTemp("", "mcrn")
	check(t, err)
	t.Cleanup(func() { os.RemoveAll(dir) })
	socket = filepath.Join(dir, "notify")
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
			s.told, s.at = append(s.told, string(buffer[:n])), append(s.at, time.Now())
			s.mu.Unlock()
		}
	}()
	return s, socket
}

// count is how often something was told, last when it was the last time.
func (s *systemd) count(text string) (times int, last time.Time) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for i, told := range s.told {
		if strings.HasPrefix(told, text) {
			times, last = times+1, s.at[i]
		}
	}
	return times, last
}

// rewrite changes the configuration file of a node, by rename.
func rewrite(t *testing.T, n *harness.Node, old, new string) {
	t.Helper()
	file := filepath.Join(n.Dir, "config.toml")
	data, err := os.ReadFile(file)
	check(t, err)
	if !strings.Contains(string(data), old) {
		t.Fatalf("the configuration has no %q", old)
	}
	check(t, os.WriteFile(file+".new", []byte(strings.Replace(string(data), old, new, 1)), 0o600))
	check(t, os.Rename(file+".new", file))
}

// reload changes the configuration of a node, and waits until it is in force.
func reload(t *testing.T, n *harness.Node, old, new string) {
	t.Helper()
	before := strings.Count(n.Log(), "configuration reloaded")
	rewrite(t, n, old, new)
	check(t, syscall.Kill(n.PID(), syscall.SIGHUP))
	eventually(t, "it is reloaded: "+new, patience, func() bool { return strings.Count(n.Log(), "configuration reloaded") > before })
}

// A changed file is in force without a restart and without being asked, systemd
// is told, and what cannot be reloaded is named.
func TestReload(t *testing.T) {
	s, socket := newSystemd(t)
	n := newNode(t, harness.NoNetwork(), harness.Env("NOTIFY_SOCKET="+socket), harness.Config("log_level = 'debug'\nshm_size = 65536\n[limits]\nreload = \"20ms\"\ncni_add = \"90s\"\n"))
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"))
	first := n.RunPod(n.PodConfig("first"))
	pid := n.PID()
	rewrite(t, n, "cni_add = \"90s\"", "cni_add = \"2s\"")
	rewrite(t, n, "shm_size = 65536", "shm_size = 131072\nmetrics_address = '127.0.0.1:0'")
	rewrite(t, n, "[limits]", "[runtimes.late]\ntype = 'oci'\npath = '/nonexistent'\n[limits]")
	eventually(t, "the limit is reloaded", patience, func() bool {
		return strings.Contains(fmt.Sprint(harness.Info[map[string]any](t, n, "config")["limits"]), "cni_add:2s")
	})
	eventually(t, "the other keys are named", patience, func() bool {
		return strings.Contains(n.Log(), "need a restart") && strings.Contains(n.Log(), "shm_size") && strings.Contains(n.Log(), "metrics_address")
	})
	eventually(t, "systemd is told of the reload and of its end", patience, func() bool {
		reloading, _ := s.count("RELOADING=1\nMONOTONIC_USEC=")
		ready, _ := s.count("READY=1")
		return reloading > 0 && ready > 1
	})
	// The limit counts.
	r.order("one", "ADD", "hang")
	_, err := run(t, n, n.PodConfig("hangs"))
	if err == nil || !strings.Contains(err.Error(), "not done after 2s") {
		t.Errorf("got %v", err)
	}
	r.order("one", "ADD", "")
	// The handler is there, and its program is missed.
	_, err = n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("late"), RuntimeHandler: "late"})
	if err == nil || !strings.Contains(err.Error(), "its runtime is not there") {
		t.Errorf("got %v", err)
	}
	// A file that cannot be read changes nothing; SIGHUP asks for it too, as often as it comes.
	for range 50 {
		check(t, syscall.Kill(pid, syscall.SIGHUP))
		check(t, syscall.Kill(pid, syscall.SIGUSR1))
	}
	rewrite(t, n, "cni_add = \"2s\"", "cni_add = \"soon\"")
	check(t, syscall.Kill(n.PID(), syscall.SIGHUP))
	eventually(t, "the error is logged", patience, func() bool { return strings.Contains(n.Log(), "stays as it was") })
	if n.PID() != pid || !ready(t, n, first) {
		t.Error("the daemon was restarted, or the pod has ended")
	}
	rewrite(t, n, "cni_add = \"soon\"", "cni_add = \"3s\"")
	eventually(t, "the next good file counts", patience, func() bool {
		return strings.Contains(fmt.Sprint(harness.Info[map[string]any](t, n, "config")["limits"]), "cni_add:3s")
	})
}

// Each kind of key that is reloaded has its effect: images, the default network,
// NRI.
func TestReloadOfEachTable(t *testing.T) {
	dir := t.TempDir()
	n := newNode(t, harness.NoNetwork(), harness.Config(fmt.Sprintf(`[limits]
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
	reload(t, n, "pinned = []", "pinned = ['"+harness.BusyboxImage+"']")
	images, err := n.Image.ListImages(limited(t), &runtimeapi.ListImagesRequest{})
	check(t, err)
	if len(images.Images) != 1 || !images.Images[0].Pinned {
		t.Errorf("images: %v", images.Images)
	}

	// A pull asks where the directories of registries lead by now.
	check(t, os.MkdirAll(filepath.Join(dir, "after", "nowhere.invalid"), 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "after", "nowhere.invalid", "hosts.toml"), []byte("server = 'http://127.0.0.1:1'\n"), 0o600))
	reload(t, n, dir+"/before", dir+"/after")
	if _, err := n.Image.PullImage(limited(t), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: "nowhere.invalid/app:1"}}); err == nil || !strings.Contains(err.Error(), "127.0.0.1:1") {
		t.Errorf("a pull by the new directories: %v", err)
	}

	// A drop-in is followed like the file itself.
	check(t, os.Mkdir(filepath.Join(n.Dir, "config.toml.d"), 0o755))
	check(t, os.WriteFile(filepath.Join(n.Dir, "config.toml.d", "network.toml"), fmt.Appendf(nil,
		"[default_network]\nenabled = true\nname = %q\nbridge = %q\nsubnet = '10.77.0.0/24'\ndata_dir = %q\n", n.Network, n.Bridge, filepath.Dir(n.Addresses)), 0o600))
	eventually(t, "the default network is there", patience, func() bool {
		isReady, _ := networkReady(t, n)
		return isReady
	})
	id := n.RunPod(n.PodConfig("web"))

	reload(t, n, "required_plugins = []", "required_plugins = ['absent']")
	if _, err := run(t, n, n.PodConfig("refused")); err == nil || !strings.Contains(err.Error(), "required NRI plugin absent") {
		t.Errorf("a pod without a required plugin: %v", err)
	}
	reload(t, n, "required_plugins = ['absent']", "required_plugins = []")
	n.RunPod(n.PodConfig("refused"))
	reload(t, n, dir+"/nri.sock", dir+"/other.sock")
	if _, err := os.Stat(dir + "/other.sock"); err != nil || !ready(t, n, id) {
		t.Errorf("plugins cannot connect at the other socket, or the pod has ended: %v", err)
	}
}

// timeOf is when the daemon wrote the first line of its log that has these words.
func timeOf(t *testing.T, n *harness.Node, words string) time.Time {
	t.Helper()
	for line := range strings.Lines(n.Log()) {
		if stamp, _, found := strings.Cut(strings.TrimPrefix(line, "time="), " "); found && strings.Contains(line, words) {
			at, err := time.Parse(time.RFC3339Nano, stamp)
			check(t, err)
			return at
		}
	}
	t.Fatalf("the log has no %q", words)
	return time.Time{}
}

// A lock that is never given back stops the pings. What systemd does then costs
// no pod.
func TestWatchdogOfAWedgedLock(t *testing.T) {
	const interval = 9 * time.Second
	s, socket := newSystemd(t)
	points := filepath.Join(filepath.Dir(socket), "points")
	binaries, err := filepath.Abs("../../bin/failpoints")
	check(t, err)
	n := newNode(t, harness.Binaries(binaries), harness.Env("NOTIFY_SOCKET="+socket, fmt.Sprintf("WATCHDOG_USEC=%d", interval.Microseconds()), "MINICRI_FAILPOINTS="+points))
	id := n.RunPod(n.PodConfig("web"))
	pause := verbose(t, n, id).PID
	eventually(t, "pings come", patience, func() bool { times, _ := s.count("WATCHDOG=1"); return times > 0 })
	check(t, os.WriteFile(points, []byte("lock pod sandbox\thang\n"), 0o600))
	ctx, cancel := context.WithCancel(context.Background())
	defer cancel()
	go n.Runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("wedges")})
	eventually(t, "the log says why the pings end", patience, func() bool { return strings.Contains(n.Log(), "probe=pods") })
	_, last := s.count("WATCHDOG=1")
	// systemd ends the daemon when an interval has passed.
	if after := timeOf(t, n, "probe=pods").Sub(last); after > interval-interval/20 {
		t.Errorf("the log says why only %s after the last ping", after)
	}
	eventually(t, "the pings have ended", patience, func() bool { return time.Since(last) > interval })
	if _, now := s.count("WATCHDOG=1"); !now.Equal(last) {
		t.Error("a ping has come from a daemon that is stuck")
	}
	n.Kill() // as systemd does, with SIGABRT
	check(t, os.Remove(points))
	n.Start()
	if after := verbose(t, n, id).PID; after != pause || !ready(t, n, id) {
		t.Errorf("the pod has pause %d, it had %d", after, pause)
	}
	n.Stop()
	eventually(t, "systemd is told of the end", patience, func() bool { stopping, _ := s.count("STOPPING=1"); return stopping > 0 })
}
