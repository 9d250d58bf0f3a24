package timeline

import (
	"archive/tar"
	"bytes"
	"compress/gzip"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/timeline"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

var update = flag.Bool("update", false, "write what is seen into docs/troubleshooting.md")

func TestMain(m *testing.M) { os.Exit(nodetest.Main(m)) }

type node struct {
	*nodetest.Node
	t *testing.T
}

func newNode(t *testing.T, opts ...nodetest.Option) node { return node{nodetest.New(t, opts...), t} }

// fast are limits with which a test need not wait long. Plugins that answer have as
// long as they need: a bridge takes seconds on a machine that has much else to do.
const fast = "[limits]\nreload = '20ms'\nretry_first = '50ms'\nretry_most = '200ms'\ncni_add = '1m'\ncni_del = '1m'\ndetach_tries = 1\n"

func (n node) plugin(name, script string) nodetest.Object {
	harness.Check(n.t, os.WriteFile(filepath.Join(n.Plugins, name), []byte("#!/bin/sh\n"+script), 0o755))
	return nodetest.Object{"type": name}
}

// network gives the node another network, and waits until it is in force.
func (n node) network(plugins ...nodetest.Object) {
	mark := fmt.Sprintf("changed-%d", time.Now().UnixNano())
	plugins[0]["mark"] = mark
	n.WriteConflist("10-test.conflist", plugins...)
	harness.Eventually(n.t, "the network is in force", func() bool {
		return strings.Contains(nodetest.Call(n.t, n.Runtime.Status, &runtimeapi.StatusRequest{Verbose: true}).GetInfo()["cniconfig"], mark)
	})
}

// fails runs a pod, which has to fail with these words, and returns the error.
func (n node) fails(pod *runtimeapi.PodSandboxConfig, words ...string) error {
	_, err := n.Runtime.RunPodSandbox(harness.Limited(n.t), &runtimeapi.RunPodSandboxRequest{Config: pod})
	harness.Need(n.t, err != nil, "the pod runs")
	says(n.t, err, words...)
	return err
}

func (n node) text(arguments ...string) string {
	n.t.Helper()
	text, err := n.RunCommand("timeline", arguments...)
	if exit, ok := err.(*exec.ExitError); ok {
		n.t.Fatalf("minicri timeline %q: %v: %s", arguments, err, exit.Stderr)
	}
	harness.Check(n.t, err)
	return text
}

// explained fails the test unless the text of the pod has all the words and no secret, and
// no line of the text is wider than a terminal. It returns the text.
func (n node) explained(pod string, words ...string) string {
	n.t.Helper()
	text := n.text(pod)
	wantWords(n.t, "the text", text, words)
	for line := range strings.Lines(text) {
		letters := utf8.RuneCountInString(strings.TrimSuffix(line, "\n"))
		harness.Want(n.t, letters <= 80, "a line of %d columns: %s", letters, line)
	}
	harness.Want(n.t, !strings.Contains(text, "\x1b") && !strings.Contains(text, "S3CRET"),
		"there are colours where there is no terminal, or a secret is shown")
	if n.t.Failed() {
		n.t.Logf("the text:\n%s", text)
	}
	return text
}

func (n node) json(arguments ...string) (pods []timeline.Pod) {
	harness.Check(n.t, json.Unmarshal([]byte(n.text(append(arguments, "--json")...)), &pods))
	return pods
}

const docs = "../../docs/troubleshooting.md"

// pluginDirs and networkName match names of the test's node. The page has usual ones.
var (
	pluginDirs  = regexp.MustCompile(`/tmp/mcr\d+/plugins:\S+/bin/cni`)
	networkName = regexp.MustCompile(`"mcr\d+"`)
)

// wantWords fails the test unless a text has all the words, wherever its lines end.
func wantWords(t *testing.T, what, text string, words []string) {
	flat := strings.Join(strings.Fields(text), " ")
	for _, word := range words {
		harness.Want(t, strings.Contains(flat, word), "%s does not say %q:\n%s", what, word, text)
	}
}

// documented is explained, and compares the end of the timeline with docs/troubleshooting.md: the page has all
// words that the end has. With -update it writes the end into the page.
func (n node) documented(name, pod string, words ...string) string {
	t, text := n.t, n.explained(pod, words...)
	page, end := harness.Read(t, docs), ending(text)
	begin, close := "<!-- "+name+" -->\n```\n", "```\n<!-- end -->\n"
	before, rest, found := strings.Cut(string(page), begin)
	shown, after, closed := strings.Cut(rest, close)
	harness.Need(t, found && closed, "docs/troubleshooting.md has no part %q", begin)
	if *update {
		end = networkName.ReplaceAllString(pluginDirs.ReplaceAllString(end, "/opt/cni/bin"), `"pod-network"`)
		harness.Check(t, os.WriteFile(docs, []byte(before+begin+end+close+after), 0o644))
		return text
	}
	flat := strings.Join(strings.Fields(end), " ")
	words = slices.DeleteFunc(words, func(word string) bool { return !strings.Contains(flat, word) })
	harness.Want(t, len(words) > 0, "the end of the timeline has no word of the cause: %s", end)
	wantWords(t, "docs/troubleshooting.md (go test ./test/timeline -update writes it)", shown, words)
	return text
}

// ending returns the causes below the table of a timeline, or the line of the slowest step if there are none.
func ending(text string) string {
	parts := strings.SplitN(text, "\n\n", 3)
	if len(parts) == 3 {
		return parts[2]
	}
	return text[strings.LastIndex(text, "  slowest: "):]
}

// bridgeWith is the node's bridge with a range of addresses.
func (n node) bridgeWith(addresses nodetest.Object) nodetest.Object {
	bridge := n.BridgePlugin()
	bridge["ipam"] = nodetest.Object{"type": "host-local", "dataDir": filepath.Dir(n.Addresses), "ranges": [][]nodetest.Object{{addresses}}}
	return bridge
}

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

func says(t *testing.T, err error, words ...string) {
	for _, word := range words {
		harness.Want(t, err != nil && strings.Contains(err.Error(), word), "the message does not say %q: %v", word, err)
	}
}

func TestBadRange(t *testing.T) {
	n := newNode(t, nodetest.Config(fast))
	n.network(n.bridgeWith(nodetest.Object{"subnet": "10.88.0.0/24", "rangeStart": "10.89.0.10"}))
	words := []string{"RangeStart 10.89.0.10 not in network 10.88.0.0/24", "correct the configuration of network"}
	n.fails(n.PodConfig("web"), words...)
	text := n.documented("bad range", "web", append(words, "failed at cni add", "bridge ADD", "cni del: a plugin failed", "undone: ")...)
	harness.Want(t, !strings.Contains(text, "✓ cni del"), "the step succeeded whose plugins failed")
	n.plugin("host-local", "exit 0\n") // whose DEL needs a good range too
}

func TestFullRange(t *testing.T) {
	n := newNode(t, nodetest.Config(fast))
	n.network(n.bridgeWith(nodetest.Object{"subnet": "10.88.0.0/30"}))
	n.RunPod(n.PodConfig("first"))
	words := []string{"no IP addresses available", "remove pods, or give it a larger range"}
	d := details(t, n.fails(n.PodConfig("web"), words...))
	harness.Want(t, d["step"] == "pod/cni add", "details %v", d)
	harness.Want(t, d["plugin"] == "bridge", "details %v", d)
	harness.Want(t, d["verb"] == "ADD", "details %v", d)
	harness.Want(t, d["cni_code"] != "", "details %v", d)
	harness.Want(t, strings.Contains(d["cni_message"], "no IP addresses"), "details %v", d)
	n.documented("full range", "web", append(words, "failed at cni add", "bridge ADD", "CNI error code")...)
	first := n.json("first")
	harness.Need(t, len(first) == 1, "the first pod: %+v", first)
	harness.Want(t, first[0].State == "ready", "the first pod: %+v", first)
	harness.Want(t, len(first[0].Addresses) == 1, "the first pod: %+v", first)
	harness.Want(t, len(first[0].Problems()) == 0, "the first pod: %+v", first)
}

func TestMissingPlugin(t *testing.T) {
	n := newNode(t, nodetest.Config(fast))
	n.network(n.BridgePlugin(), nodetest.Object{"type": "not-installed"})
	words := []string{"failed to find the plugin not-installed in", "install it or set cni_bin_dir"}
	n.fails(n.PodConfig("web"), words...)
	n.documented("missing plugin", "web", append(words, "failed at cni add", "not-installed ADD")...)
	n.plugin("not-installed", "exit 0\n") // for its DEL
}

// The plugin is the only one of its network: the limit is that of the whole ADD, and
// of another plugin nobody knows how long it takes.
func TestHungPlugin(t *testing.T) {
	n := newNode(t, nodetest.Config(strings.Replace(fast, "cni_add = '1m'", "cni_add = '2s'", 1)))
	n.network(n.plugin("waits", "[ $CNI_COMMAND != ADD ] || exec sleep 1000\n"))
	words := []string{"it did not answer: not done after 2s", "limits.cni_add"}
	d := details(t, n.fails(n.PodConfig("web"), words...))
	harness.Want(t, d["plugin"] == "waits" && d["advice"] != "", "details %v", d)
	n.documented("hung plugin", "web", append(words, "failed at cni add", "waits ADD", "killed: ", "slowest: cni add > waits ADD")...)
}

func TestRubbish(t *testing.T) {
	n := newNode(t, nodetest.Config(fast))
	n.network(n.BridgePlugin(), n.plugin("chatty", "[ $CNI_COMMAND != ADD ] || { echo 'connecting to agent ... token=S3CRET ok'; echo 'warning: old config' >&2; }\n"))
	err := n.fails(n.PodConfig("web"), "plugin chatty: it succeeded, and what it printed is no CNI result", "connecting to agent")
	n.documented("rubbish", "web", "failed at cni add", "chatty ADD", "what it printed is no CNI result", "connecting to agent", "stderr: warning: old config",
		"prints its result and nothing else to stdout")
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
	_, err := n.Image.PullImage(harness.Limited(t), request)
	says(t, err, "RegistryUnavailable", "connection refused", "check whether the registry answers from this node", "hosts.toml")
	words := []string{"pull 127.0.0.1:1/team/app:v1", "the pull of 127.0.0.1:1/team/app:v1 failed", "connection refused", "check whether the registry answers from this node"}
	n.documented("dead registry", "web", words...)
	// A pull that is for no pod is kept by itself.
	request.SandboxConfig = nil
	says(t, nodetest.Err(t, n.Image.PullImage, request), "connection refused")
	n.explained("127.0.0.1:1/team/app:v1", "the pull failed", "connection refused")
	// It outlives the daemon, and is read without one.
	n.Stop()
	n.explained("web", words...)
	n.Start()
	n.explained("web", words...)
}

// app is a container with secrets and a limit of memory.
func app(script string, memory int64) *runtimeapi.ContainerConfig {
	config := nodetest.Container("app", "/bin/sh", "-c", script)
	config.Envs = []*runtimeapi.KeyValue{{Key: "PASSWORD", Value: []byte("S3CRET")}, {Key: "PLAIN", Value: []byte("S3CRET")}}
	config.Linux.Resources.MemoryLimitInBytes = memory
	return config
}

func TestImageWithoutEntrypoint(t *testing.T) {
	n := newNode(t)
	n.BuildImage("test.example/data:1", nodetest.Object{}, func(l *nodetest.Layer) { l.File("data", 0o644, 0, "data") })
	pod := n.PodConfig("web")
	config := nodetest.Container("app")
	config.Image.Image = "test.example/data:1"
	_, err := n.CreateContainer(n.RunPod(pod), pod, config)
	words := []string{"no command specified", "give the container a command, or the image an entrypoint"}
	says(t, err, words...)
	words = append(words, "container app failed at check")
	n.documented("no entrypoint", "web", words...)
	n.explained("app", words...)
}

func TestOOM(t *testing.T) {
	n := newNode(t)
	n.ImportBusybox()
	pod := n.PodConfig("web")
	id := n.RunContainer(n.RunPod(pod), pod, app("exec tail /dev/zero", 16<<20))
	harness.Eventually(t, "the container has ended", func() bool {
		answer := nodetest.Call(t, n.Runtime.ContainerStatus, &runtimeapi.ContainerStatusRequest{ContainerId: id})
		return answer.Status.State == runtimeapi.ContainerState_CONTAINER_EXITED
	})
	words := []string{"app: ended", "OOMKilled, exit code 137", "it used all of its memory, 16 MiB: raise the container's memory limit"}
	n.documented("OOM", "web", words...)
	n.explained(id[:12], words...)
	nodetest.Call(t, n.Runtime.RemoveContainer, &runtimeapi.RemoveContainerRequest{ContainerId: id})
	n.explained("web", words...) // it is remembered
}

// The disk is a real file system that stops for a while.
func TestSlowDisk(t *testing.T) {
	n := newNode(t)
	n.Stop()
	t.Cleanup(n.Start)
	freeze := harness.Disk(t, n.Root)
	t.Cleanup(n.Stop)
	n.Start()
	for frozen := 2 * time.Second; ; frozen *= 3 { // until it is longer than all other steps, of a busy machine too
		time.AfterFunc(frozen, freeze())
		id := n.RunPod(n.PodConfig("web"))
		text, err := n.RunCommand("timeline", "web")
		harness.Check(t, err)
		if strings.Contains(text, "slowest: record took ") {
			defer n.RemovePod(id)
			break
		}
		n.RemovePod(id)
	}
	n.documented("slow disk", "web", "slowest: record took ", "the disk of the runtime's directory")
}

// The node at a glance, the list of lives, and what a maintainer gets.
func TestNodeAtAGlance(t *testing.T) {
	credentials := filepath.Join(t.TempDir(), "docker.json")
	harness.Check(t, os.WriteFile(credentials, []byte(`{"auths": {"127.0.0.1:1": {"username": "me", "password": "S3CRET"}}}`), 0o600))
	n := newNode(t, nodetest.Config(fmt.Sprintf("default_env = ['EVERYWHERE=S3CRET']\n[images]\ndocker_config = '%s'\n%s", credentials, fast)))
	n.ImportBusybox()
	bridge := n.BridgePlugin()
	bridge["agent"] = nodetest.Object{"password": "S3CRET", "url": "https://me:S3CRET@agent.example/"}
	n.network(bridge)
	pod := n.PodConfig("web", func(c *runtimeapi.PodSandboxConfig) {
		c.Annotations = map[string]string{"vault.example/token": "S3CRET", "plain.example/text": "S3CRET"}
		c.Labels["key"] = "S3CRET"
	})
	config := app("sleep 1000000", 64<<20)
	config.Args, config.Annotations = []string{"--password=S3CRET"}, map[string]string{"note": "S3CRET"}
	n.RunContainer(n.RunPod(pod), pod, config)

	var glance timeline.Glance
	text, err := n.RunCommand("pods", "--json")
	harness.Check(t, err)
	harness.Check(t, json.Unmarshal([]byte(text), &glance))
	harness.Need(t, len(glance.Pods) == 1 && glance.Daemon >= 1<<20, "%s", text)
	line := glance.Pods[0]
	harness.Want(t, line.Name == "test/web", "%+v", line)
	harness.Want(t, line.State == timeline.Ready, "%+v", line)
	harness.Want(t, line.Running == 1, "%+v", line)
	harness.Want(t, line.Containers == 1, "%+v", line)
	harness.Want(t, len(line.Addresses) == 1, "%+v", line)
	harness.Want(t, line.Memory != 0, "%+v", line)
	harness.Want(t, line.Runtime != 0, "%+v", line)
	table, err := n.RunCommand("pods")
	harness.Check(t, err)
	for _, want := range []string{"test/web", "ready", "1/1", line.Addresses[0], "1 pod; daemon "} {
		harness.Want(t, strings.Contains(table, want), "the table lacks %q:\n%s", want, table)
	}

	info, err := os.Stat(filepath.Join(n.State, "debug.sock"))
	harness.Check(t, err)
	harness.Want(t, info.Mode().Perm() == 0o600, "the socket has mode %v", info.Mode())
	list := n.text()
	harness.Want(t, strings.Contains(list, "test/web") && strings.Contains(list, "ready"), "the list:\n%s", list)
	failed := n.json("--failed")
	harness.Want(t, len(failed) == 0, "failed: %+v", failed)
	n.fails(n.PodConfig("bad", func(c *runtimeapi.PodSandboxConfig) { c.Linux.Sysctls = map[string]string{"no.such.thing": "1"} }))
	failed = n.json("--failed", "--since", "1h")
	harness.Want(t, len(failed) == 1 && failed[0].Name == "test/bad", "failed: %+v", failed)
	slowest := n.json("--slowest", "1")
	harness.Want(t, len(slowest) == 1 && slowest[0].Name == "test/web", "slowest: %+v", slowest)
	for _, auth := range []*runtimeapi.AuthConfig{nil, {Username: "me", Password: "S3CRET"}, {RegistryToken: "S3CRET"}, {Auth: "bWU6UzNDUkVU"}} {
		_, err := n.Image.PullImage(harness.Limited(t), &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: "127.0.0.1:1/app:1", Annotations: map[string]string{"a": "S3CRET"}}, Auth: auth, SandboxConfig: pod})
		says(t, err, "connection refused")
	}
	bundle(t, n)
	all := n.text("web") + n.text("web", "--json") + n.text("--json") + text + table
	for _, secret := range secrets {
		harness.Want(t, !strings.Contains(all, secret), "%s is shown", secret)
	}
	harness.Want(t, !strings.Contains(n.Log(), "S3CRET"), "the log at level debug has a secret")
}

// secrets are the word that is in every secret of the test, and its base64.
var secrets = []string{"S3CRET", "UzNDUkVU"}

// bundle: every part is there, and no secret.
func bundle(t *testing.T, n node) {
	file := filepath.Join(t.TempDir(), "bundle.tar.gz")
	_, err := n.RunCommand("debug", "bundle", file)
	harness.Check(t, err)
	packed, err := gzip.NewReader(bytes.NewReader(harness.Read(t, file)))
	harness.Check(t, err)
	var names []string
	for archive := tar.NewReader(packed); ; {
		header, err := archive.Next()
		if errors.Is(err, io.EOF) {
			break
		}
		harness.Check(t, err)
		content, err := io.ReadAll(archive)
		harness.Check(t, err)
		for _, secret := range secrets {
			harness.Want(t, !bytes.Contains(content, []byte(secret)), "%s has a secret", header.Name)
		}
		names = append(names, strings.TrimPrefix(header.Name, "minicri-debug/"))
	}
	for _, want := range []string{"version.txt", "config.json", "timelines.json", "pods.json", "goroutines.txt", "heap.pprof", "metrics.txt", "check.json", "networks/10-test.conflist.json", "machine-links.txt"} {
		harness.Want(t, slices.Contains(names, want), "the bundle lacks %s: %q", want, names)
	}
	harness.Want(t, slices.ContainsFunc(names, func(name string) bool { return strings.HasPrefix(name, "supervisors/") }),
		"the bundle has no log of a supervisor: %q", names)
}
