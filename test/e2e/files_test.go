package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// podFile reads a file that the containers of a pod share.
func podFile(t *testing.T, n *harness.Node, id, name string) string {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(n.State, "sandboxes", id, name))
	check(t, err)
	return string(data)
}

// cri: PodSandboxConfig.hostname
func TestHostname(t *testing.T) {
	n := newNode(t)
	config := n.PodConfig("web")
	config.Hostname = "web-0.example"
	id := n.RunPod(config)
	var name unix.Utsname
	inside(t, pausePID(t, n, id), map[string]int{"uts": unix.CLONE_NEWUTS}, func() error { return unix.Uname(&name) })
	if got := unix.ByteSliceToString(name.Nodename[:]); got != "web-0.example" {
		t.Errorf("in pause's namespace the host is %q", got)
	}
	if got := podFile(t, n, id, "hostname"); got != "web-0.example\n" {
		t.Errorf("the file says %q", got)
	}
}

func TestHostnameOfHostNetwork(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web", harness.HostNetwork()))
	own, err := os.Hostname()
	check(t, err)
	if got := podFile(t, n, id, "hostname"); got != own+"\n" {
		t.Errorf("want the node's name %q, got %q", own, got)
	}
}

// cri: DNSConfig.options DNSConfig.searches DNSConfig.servers PodSandboxConfig.dns_config
func TestDNS(t *testing.T) {
	n := newNode(t)
	node, err := os.ReadFile("/etc/resolv.conf")
	check(t, err)
	for name, c := range map[string]struct {
		dns  *runtimeapi.DNSConfig
		want string
	}{
		"full": {&runtimeapi.DNSConfig{
			Servers: []string{"10.96.0.10", "fd00::53"}, Searches: []string{"a.svc", "b.example"}, Options: []string{"ndots:5", "edns0"},
		}, "search a.svc b.example\nnameserver 10.96.0.10\nnameserver fd00::53\noptions ndots:5 edns0\n"},
		"empty": {&runtimeapi.DNSConfig{}, ""},
		"none":  {nil, string(node)},
	} {
		config := n.PodConfig(name)
		config.DnsConfig = c.dns
		id := n.RunPod(config)
		if got := podFile(t, n, id, "resolv.conf"); got != c.want {
			t.Errorf("%s: want %q, got %q", name, c.want, got)
		}
	}
}

func TestHostsAndSharedMemory(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	hosts, err := os.ReadFile("/etc/hosts")
	check(t, err)
	if got := podFile(t, n, id, "hosts"); got != string(hosts) {
		t.Errorf("want the node's hosts, got %q", got)
	}
	var stat unix.Statfs_t
	check(t, unix.Statfs(filepath.Join(n.State, "sandboxes", id, "shm"), &stat))
	if stat.Type != unix.TMPFS_MAGIC || stat.Blocks*uint64(stat.Bsize) != 64<<20 {
		t.Errorf("shm is of type %x with %d bytes", stat.Type, stat.Blocks*uint64(stat.Bsize))
	}
}

// What a pod that has ended keeps in memory is given back when it is stopped: the
// kubelet keeps its sandbox for as long as the pod object lives.
func TestSharedMemoryIsGivenBackAtStop(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	dir := filepath.Join(n.State, "sandboxes", id)
	check(t, os.WriteFile(filepath.Join(dir, "shm", "much"), make([]byte, 8<<20), 0o600))
	_, err := n.Runtime.StopPodSandbox(limited(t), &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	check(t, err)
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(dir))
	check(t, err)
	for _, m := range mounts {
		t.Errorf("a stopped pod keeps the mount %s", m.Mountpoint)
	}
	check(t, remove(t, n, id))
}

// A log directory on a mount whose server is gone ends its own call at the limit,
// again and again, and holds up neither another pod nor the end of the daemon.
func TestLogDirectoryOnADeadMount(t *testing.T) {
	const short, long = "run = \"2s\"\ncni_add = \"1s\"\n", "run = \"2m\"\ncni_add = \"1m\"\n"
	n := newNode(t, harness.Config("[limits]\nreload = \"20ms\"\nshutdown = \"2s\"\n"+short))
	config := n.PodConfig("web")
	config.LogDirectory = filepath.Join(harness.DeadMount(t), "logs")
	for range 2 {
		_, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: config})
		if status.Code(err) != codes.Unavailable && status.Code(err) != codes.DeadlineExceeded || !strings.Contains(err.Error(), config.LogDirectory) {
			t.Errorf("the error does not name the directory: %v", err)
		}
	}
	reload(t, n, short, long)
	n.RemovePod(n.RunPod(n.PodConfig("other")))
	good := n.PodConfig("web")
	n.RemovePod(n.RunPod(good))
	done := make(chan error, 1)
	go func() {
		_, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: config})
		done <- err
	}()
	eventually(t, "it is under way", patience, func() bool { return len(harness.Info[[]any](t, n, "building")) == 1 })
	began := time.Now()
	n.Stop()
	if took := time.Since(began); took > 20*time.Second {
		t.Errorf("the daemon took %v to end", took)
	}
	if err := <-done; err == nil {
		t.Error("the request succeeded")
	}
	n.Start()
	if pods := list(t, n, nil); len(pods) != 0 {
		t.Errorf("listed: %v", pods)
	}
}

// cri: PodSandboxConfig.log_directory
func TestLogDirectory(t *testing.T) {
	n := newNode(t)
	config := n.PodConfig("web")
	config.LogDirectory = filepath.Join(n.Logs, "deep", "below")
	id := n.RunPod(config)
	info, err := os.Stat(config.LogDirectory)
	check(t, err)
	if !info.IsDir() || info.Mode().Perm() != 0o755 {
		t.Errorf("it is %v", info.Mode())
	}
	// The kubelet's log of the pod's end is in there.
	check(t, remove(t, n, id))
	if _, err := os.Stat(config.LogDirectory); err != nil {
		t.Errorf("the kubelet's directory went with the pod: %v", err)
	}
}
