package timeline

import (
	"context"
	"encoding/json"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"
	"unicode/utf8"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/timeline"
	"github.com/minicri/minicri/test/harness"
)

var update = flag.Bool("update", false, "write what is seen into docs/troubleshooting.md")

func TestMain(m *testing.M) { os.Exit(harness.Main(m)) }

const patience = 2 * time.Minute

func limited(t testing.TB) context.Context { return harness.Limited(t, patience) }

type node struct {
	*harness.Node
	t *testing.T
}

func newNode(t *testing.T, opts ...harness.Option) node { return node{harness.NewNode(t, opts...), t} }

// fast are limits with which a test need not wait long. Plugins that answer have as
// long as they need: a bridge takes seconds on a machine that has much else to do.
const fast = "[limits]\nreload = '20ms'\nretry_first = '50ms'\nretry_most = '200ms'\ncni_add = '1m'\ncni_del = '1m'\ndetach_tries = 1\n"

func (n node) plugin(name, script string) harness.Object {
	harness.Check(n.t, os.WriteFile(filepath.Join(n.Plugins, name), []byte("#!/bin/sh\n"+script), 0o755))
	return harness.Object{"type": name}
}

// network gives the node another network, and waits until it is in force.
func (n node) network(plugins ...harness.Object) {
	mark := fmt.Sprintf("changed-%d", time.Now().UnixNano())
	plugins[0]["mark"] = mark
	n.WriteConflist("10-test.conflist", plugins...)
	harness.Eventually(n.t, "the network is in force", patience, func() bool {
		return strings.Contains(harness.Call(n.t, n.Runtime.Status, &runtimeapi.StatusRequest{Verbose: true}).GetInfo()["cniconfig"], mark)
	})
}

// fails runs a pod, which has to fail with these words, and returns the error.
func (n node) fails(pod *runtimeapi.PodSandboxConfig, words ...string) error {
	_, err := n.Runtime.RunPodSandbox(limited(n.t), &runtimeapi.RunPodSandboxRequest{Config: pod})
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

// pluginDirs are those of a test's node, in a page those of any node.
var pluginDirs = regexp.MustCompile(`/tmp/mcr\d+/plugins:\S+/bin/cni`)

// wantWords fails the test unless a text has all the words, wherever its lines end.
func wantWords(t *testing.T, what, text string, words []string) {
	flat := strings.Join(strings.Fields(text), " ")
	for _, word := range words {
		harness.Want(t, strings.Contains(flat, word), "%s does not say %q:\n%s", what, word, text)
	}
}

// documented is explained, and keeps the page docs/troubleshooting.md what the tests see:
// with -update it puts the text there, and otherwise it wants the words to be there.
func (n node) documented(name, pod string, words ...string) string {
	t, text := n.t, n.explained(pod, words...)
	page := harness.Read(t, docs)
	begin, end := "<!-- "+name+" -->\n```\n", "```\n<!-- end -->\n"
	before, rest, found := strings.Cut(string(page), begin)
	shown, after, closed := strings.Cut(rest, end)
	harness.Need(t, found && closed, "docs/troubleshooting.md has no part %q", begin)
	if *update {
		harness.Check(t, os.WriteFile(docs, []byte(before+begin+pluginDirs.ReplaceAllString(text, "/opt/cni/bin")+end+after), 0o644))
		return text
	}
	wantWords(t, "docs/troubleshooting.md, which go test ./test/timeline -update writes,", shown, words)
	return text
}
