package timeline

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// bridgeWith is the node's bridge with a range of addresses.
func (n node) bridgeWith(addresses harness.Object) harness.Object {
	bridge := n.BridgePlugin()
	bridge["ipam"] = harness.Object{"type": "host-local", "dataDir": filepath.Dir(n.Addresses), "ranges": [][]harness.Object{{addresses}}}
	return bridge
}

// details are the fields of a call's error.
func details(t *testing.T, err error) map[string]string {
	t.Helper()
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.ErrorInfo); ok {
			return info.GetMetadata()
		}
	}
	t.Errorf("no details: %v", err)
	return nil
}

// says fails the test unless the error's message has the words.
func says(t *testing.T, err error, words ...string) {
	t.Helper()
	for _, word := range words {
		if err == nil || !strings.Contains(err.Error(), word) {
			t.Errorf("the message does not say %q: %v", word, err)
		}
	}
}

func TestBadRange(t *testing.T) {
	n := newNode(t, harness.Config(fast))
	n.network(n.bridgeWith(harness.Object{"subnet": "10.88.0.0/24", "rangeStart": "10.89.0.10"}))
	err := n.fails(n.PodConfig("web"))
	says(t, err, "RangeStart 10.89.0.10 not in network 10.88.0.0/24", "correct the configuration of network")
	words := []string{"failed at cni add", "bridge ADD", "RangeStart 10.89.0.10 not in network 10.88.0.0/24", "correct the configuration of network", "cni del: a plugin failed", "undone: "}
	text := n.explained("web", words...)
	documented(t, "bad range", text, words...)
	if strings.Contains(text, "✓ cni del") {
		t.Error("the step succeeded whose plugins failed")
	}
	n.plugin("host-local", "exit 0\n") // whose DEL needs a good range too
}

func TestFullRange(t *testing.T) {
	n := newNode(t, harness.Config(fast))
	n.network(n.bridgeWith(harness.Object{"subnet": "10.88.0.0/30"}))
	n.RunPod(n.PodConfig("first"))
	err := n.fails(n.PodConfig("web"))
	says(t, err, "no IP addresses available", "has no free address: remove pods, or give it a larger range")
	d := details(t, err)
	if d["step"] != "pod/cni add" || d["plugin"] != "bridge" || d["verb"] != "ADD" || d["cni_code"] == "" || !strings.Contains(d["cni_message"], "no IP addresses") {
		t.Errorf("details %v", d)
	}
	words := []string{"failed at cni add", "bridge ADD", "no IP addresses available in range set", "CNI error code", "remove pods, or give it a larger range"}
	documented(t, "full range", n.explained("web", words...), words...)
	if first := n.json("first"); len(first) != 1 || first[0].State != "ready" || len(first[0].Addresses) != 1 || len(first[0].Problems()) > 0 {
		t.Errorf("the first pod: %+v", first)
	}
}

func TestMissingPlugin(t *testing.T) {
	n := newNode(t, harness.Config(fast))
	n.network(n.BridgePlugin(), harness.Object{"type": "not-installed"})
	err := n.fails(n.PodConfig("web"))
	says(t, err, "failed to find the plugin not-installed in", "install it or set cni_bin_dir")
	words := []string{"failed at cni add", "not-installed ADD", "failed to find the plugin not-installed in", "install it or set cni_bin_dir"}
	documented(t, "missing plugin", n.explained("web", words...), words...)
	n.plugin("not-installed", "exit 0\n") // for its DEL
}

// The plugin is the only one of its network: the limit is that of the whole ADD, and
// of another plugin nobody knows how long it takes.
func TestHungPlugin(t *testing.T) {
	n := newNode(t, harness.Config(strings.Replace(fast, "cni_add = '1m'", "cni_add = '2s'", 1)))
	n.network(n.plugin("waits", "[ $CNI_COMMAND != ADD ] || exec sleep 1000\n"))
	err := n.fails(n.PodConfig("web"))
	says(t, err, "plugin waits: it did not answer: not done after 2s", "limits.cni_add")
	if d := details(t, err); d["plugin"] != "waits" || d["advice"] == "" {
		t.Errorf("details %v", d)
	}
	words := []string{"failed at cni add", "waits ADD", "killed: it did not answer: not done after 2s", "limits.cni_add", "slowest: cni add > waits ADD"}
	documented(t, "hung plugin", n.explained("web", words...), words...)
}

func TestRubbish(t *testing.T) {
	n := newNode(t, harness.Config(fast))
	n.network(n.BridgePlugin(), n.plugin("chatty", "[ $CNI_COMMAND != ADD ] || { echo 'connecting to agent ... token=S3CRET ok'; echo 'warning: old config' >&2; }\n"))
	err := n.fails(n.PodConfig("web"))
	says(t, err, "plugin chatty: it succeeded, and what it printed is no CNI result", "connecting to agent")
	words := []string{"failed at cni add", "chatty ADD", "what it printed is no CNI result", "connecting to agent", "stderr: warning: old config", "prints its result and nothing else to stdout"}
	text := n.explained("web", words...)
	documented(t, "rubbish", text, words...)
	if strings.Contains(text, "S3CRET") {
		t.Error("a secret is shown")
	}
	for _, detail := range status.Convert(err).Details() {
		if info, ok := detail.(*errdetails.DebugInfo); ok && strings.Contains(info.GetDetail(), "old config") {
			return
		}
	}
	t.Errorf("no end of stderr in the details: %v", status.Convert(err).Details())
}

// A pull belongs to the pod that it is for.
//
// cri: PullImageRequest.sandbox_config
func TestDeadRegistry(t *testing.T) {
	n := newNode(t)
	pod := n.PodConfig("web")
	n.RunPod(pod)
	request := &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: "127.0.0.1:1/team/app:v1"}, SandboxConfig: pod, Auth: &runtimeapi.AuthConfig{Username: "me", Password: "S3CRET"}}
	_, err := n.Image.PullImage(limited(t), request)
	says(t, err, "RegistryUnavailable", "connection refused", "see whether the registry answers from this node", "hosts.toml")
	words := []string{"pull 127.0.0.1:1/team/app:v1", "the pull of 127.0.0.1:1/team/app:v1 failed", "connection refused", "see whether the registry answers from this node"}
	text := n.explained("web", words...)
	documented(t, "dead registry", text, words...)
	if strings.Contains(text, "S3CRET") {
		t.Error("a secret is shown")
	}
	// A pull that is for no pod is kept by itself.
	request.SandboxConfig = nil
	_, err = n.Image.PullImage(limited(t), request)
	says(t, err, "connection refused")
	n.explained("127.0.0.1:1/team/app:v1", "the pull failed", "connection refused")
	// It outlives the daemon, and is read without one.
	n.Stop()
	n.explained("web", words...)
	n.Start()
	n.explained("web", words...)
}

func (n node) container(pod *runtimeapi.PodSandboxConfig, id, name, image, script string, memory int64) *runtimeapi.CreateContainerRequest {
	config := &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name}, Image: &runtimeapi.ImageSpec{Image: image},
		Envs:  []*runtimeapi.KeyValue{{Key: "PASSWORD", Value: []byte("S3CRET")}, {Key: "PLAIN", Value: []byte("S3CRET")}},
		Linux: &runtimeapi.LinuxContainerConfig{Resources: &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: memory}},
	}
	if script != "" {
		config.Command = []string{"/bin/sh", "-c", script}
	}
	return &runtimeapi.CreateContainerRequest{PodSandboxId: id, Config: config, SandboxConfig: pod}
}

func TestImageWithoutEntrypoint(t *testing.T) {
	n := newNode(t)
	n.BuildImage("test.example/data:1", harness.Object{}, func(l *harness.Layer) { l.File("data", 0o644, 0, "data") })
	pod := n.PodConfig("web")
	id := n.RunPod(pod)
	_, err := n.Runtime.CreateContainer(limited(t), n.container(pod, id, "app", "test.example/data:1", "", 0))
	says(t, err, "no command specified", "give the container a command, or the image an entrypoint")
	words := []string{"container app failed at check", "no command specified", "give the container a command, or the image an entrypoint"}
	documented(t, "no entrypoint", n.explained("web", words...), words...)
	n.explained("app", words...)
}

func TestOOM(t *testing.T) {
	n := newNode(t)
	n.ImportBusybox()
	pod := n.PodConfig("web")
	id := n.RunPod(pod)
	made, err := n.Runtime.CreateContainer(limited(t), n.container(pod, id, "app", harness.BusyboxImage, "exec tail /dev/zero", 16<<20))
	check(t, err)
	_, err = n.Runtime.StartContainer(limited(t), &runtimeapi.StartContainerRequest{ContainerId: made.ContainerId})
	check(t, err)
	harness.Eventually(t, "the container has ended", patience, func() bool {
		answer, err := n.Runtime.ContainerStatus(limited(t), &runtimeapi.ContainerStatusRequest{ContainerId: made.ContainerId})
		check(t, err)
		return answer.Status.State == runtimeapi.ContainerState_CONTAINER_EXITED
	})
	words := []string{"app: ended", "OOMKilled, exit code 137", "it used all of its memory, 16 MiB: raise the container's memory limit"}
	text := n.explained("web", words...)
	documented(t, "OOM", text, words...)
	n.explained(made.ContainerId[:12], words...)
	if strings.Contains(text, "S3CRET") {
		t.Error("a variable's value is shown")
	}
	_, err = n.Runtime.RemoveContainer(limited(t), &runtimeapi.RemoveContainerRequest{ContainerId: made.ContainerId})
	check(t, err)
	n.explained("web", words...) // it is remembered
}

// The disk is a real file system that stops for a while.
func TestSlowDisk(t *testing.T) {
	n := newNode(t)
	n.Stop()
	disk := filepath.Join(t.TempDir(), "disk")
	check(t, os.WriteFile(disk, nil, 0o600))
	check(t, os.Truncate(disk, 64<<20))
	command(t, "mkfs.ext4", "-q", disk)
	command(t, "mount", "-o", "loop", disk, n.Root)
	n.Start()
	t.Cleanup(func() {
		n.Stop()
		command(t, "umount", n.Root)
		n.Start()
	})
	command(t, "fsfreeze", "-f", n.Root)
	frozen := time.AfterFunc(2*time.Second, func() { command(t, "fsfreeze", "-u", n.Root) })
	defer frozen.Stop()
	id := n.RunPod(n.PodConfig("web"))
	defer n.RemovePod(id)
	words := []string{"slowest: record took ", "the disk of the runtime's directory"}
	documented(t, "slow disk", n.explained("web", words...), words...)
}

func command(t *testing.T, name string, arguments ...string) {
	t.Helper()
	if output, err := exec.Command(name, arguments...).CombinedOutput(); err != nil {
		t.Errorf("%s %q: %v: %s", name, arguments, err, output)
	}
}
