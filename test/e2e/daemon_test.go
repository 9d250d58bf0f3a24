package e2e

import (
	"context"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

func TestSocketIsForRootAlone(t *testing.T) {
	n := newNode(t)
	info, err := os.Stat(n.Socket)
	check(t, err)
	if info.Mode() != os.ModeSocket|0o600 {
		t.Errorf("its mode is %v", info.Mode())
	}
}

// cri: PodSandbox.id
func TestTwoDaemonsSideBySide(t *testing.T) {
	nodes := harness.NewNodes(t, 2, harness.Parallel())
	a, b := nodes[0].RunPod(nodes[0].PodConfig("web")), nodes[1].RunPod(nodes[1].PodConfig("web"))
	for i, n := range nodes {
		if pods := list(t, n, nil); len(pods) != 1 || pods[0].Id != []string{a, b}[i] {
			t.Errorf("daemon %d lists %v", i, pods)
		}
	}
	// What is the other's is not swept when one starts.
	nodes[0].Kill()
	nodes[0].Start()
	if !ready(t, nodes[0], a) || !ready(t, nodes[1], b) {
		t.Error("a pod was lost when one daemon was started again")
	}
}

func TestSecondDaemonOnTheSameDirectoriesIsRefused(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	other := filepath.Join(n.Dir, "o") // short: sockets are below the state directory
	for name, flags := range map[string][]string{
		n.Root:   {"--state", other + "s", "--socket", other + ".sock"},
		n.State:  {"--root", other + "r", "--socket", other + ".sock"},
		n.Socket: {"--root", other + "r", "--state", other + "s", "--netns-dir", other + "-netns"},
	} {
		output, err := n.RunDaemon(flags...)
		if err == nil || !strings.Contains(output, name) {
			t.Errorf("%s: want an error that names it, got %v: %s", name, err, output)
		}
	}
	if !ready(t, n, id) {
		t.Error("the first daemon's pod is gone")
	}
}

func TestSIGTERMLetsCallsFinish(t *testing.T) {
	n := newNode(t, harness.NoNetwork(), harness.Config(fast+`shutdown = "50s"`))
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"))
	r.order("one", "ADD", "wait")
	answered := make(chan error, 1)
	go func() {
		_, err := n.Runtime.RunPodSandbox(context.Background(), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web")})
		answered <- err
	}()
	eventually(t, "ADD runs", patience, func() bool { return len(r.calls("ADD")) == 1 })
	ctx := limited(t)
	go func() {
		for !strings.Contains(n.Log(), "shutting down") && ctx.Err() == nil {
			time.Sleep(time.Millisecond)
		}
		r.order("one", "ADD", "")
	}()
	n.Stop()
	check(t, <-answered)
	n.Start()
	if pods := list(t, n, nil); len(pods) != 1 || pods[0].State != runtimeapi.PodSandboxState_SANDBOX_READY {
		t.Errorf("listed: %v", pods)
	}
}

func TestBadConfigurationNamesFileAndLine(t *testing.T) {
	n := newNode(t)
	file := filepath.Join(n.Dir, "bad.toml")
	for text, want := range map[string]string{
		"log_level = 7\n":                    file + ":1",
		"root = \"relative\"\n":              "root",
		"a = b = c\n":                        file + ":1",
		"[limits]\nrun = \"-1s\"\n":          "limits.run",
		"log_level = \"loud\"\n":             "log_level",
		"cgroup_driver = \"openrc\"\n":       "cgroup_driver",
		"[runtimes.kata]\ntype = \"oci\"\n":  "runtimes.kata.path",
		"[runtimes.kata]\ntype = \"wasm\"\n": "runtimes.kata.type",
		"[images]\nprogress_timeout = 60\n":  "images.progress_timeout",
		"[limits]\nretry_first = \"1h\"\n":   "limits.retry_first",
	} {
		check(t, os.WriteFile(file, []byte(text), 0o600))
		output, err := n.RunCommand("config", "check", file)
		_ = output
		if err == nil {
			t.Errorf("config check found nothing wrong with %q", text)
		}
		if strings.HasPrefix(text, "root") || strings.HasPrefix(text, "log_level = \"loud") {
			continue // a flag takes its place
		}
		output, err = n.RunDaemon("--config", file, "--root", n.Dir+"/r2", "--state", n.Dir+"/s2", "--socket", n.Dir+"/2.sock")
		if err == nil || !strings.Contains(output, want) {
			t.Errorf("%q: want an error with %s, got %v: %s", text, want, err, output)
		}
	}
}

// cri: RuntimeHandler.name StatusResponse.runtime_handlers
func TestDropInsComeAfterTheFile(t *testing.T) {
	n := newNode(t)
	n.Stop()
	dir := filepath.Join(n.Dir, "config.toml.d")
	check(t, os.Mkdir(dir, 0o755))
	check(t, os.WriteFile(filepath.Join(dir, "10.toml"), []byte("[runtimes.two]\ntype = \"shim\"\n"), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "20.toml"), []byte("[runtimes.two]\ntype = \"builtin\"\n"), 0o600))
	n.Start()
	answer, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{})
	check(t, err)
	if len(answer.RuntimeHandlers) != 3 || answer.RuntimeHandlers[2].Name != "two" {
		t.Errorf("got %v", answer.RuntimeHandlers)
	}
}

// sd_notify(3): a datagram to the socket of NOTIFY_SOCKET.
func TestReadyIsNotified(t *testing.T) {
	path := filepath.Join(t.TempDir(), "notify")
	socket, err := net.ListenUnixgram("unixgram", &net.UnixAddr{Name: path, Net: "unixgram"})
	check(t, err)
	defer socket.Close()
	n := newNode(t, harness.Env("NOTIFY_SOCKET="+path))
	wantNotice(t, socket, "READY=1")
	n.Stop()
	wantNotice(t, socket, "STOPPING=1")
}

func wantNotice(t *testing.T, socket *net.UnixConn, want string) {
	t.Helper()
	check(t, socket.SetReadDeadline(time.Now().Add(patience)))
	buffer := make([]byte, 4096)
	size, err := socket.Read(buffer)
	check(t, err)
	if got := string(buffer[:size]); !strings.Contains(got, want) {
		t.Errorf("want %s, got %q", want, got)
	}
}
