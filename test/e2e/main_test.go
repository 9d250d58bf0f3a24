// Package e2e holds the end-to-end tests of minicri, one file for each feature: the real daemon over its
// socket, real CNI plugins, the real kernel.
//
// A test makes a node of the package harness, which looks for leaks when the test ends. TestPropertyN_ tests
// the property of that number in docs/contributors/properties.md. The package has no other code than its tests; they need
// root and run under hack/in-netns.
package e2e

import (
	"bytes"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

func TestMain(m *testing.M) { os.Exit(nodetest.Main(m)) }

// fast are limits with which a test need not wait long.
const fast = `[limits]
reload = "20ms"
status_period = "500ms"
retry_first = "50ms"
retry_most = "200ms"
`

// newNode makes a node for a test that runs beside others.
func newNode(t *testing.T, opts ...nodetest.Option) *nodetest.Node {
	return nodetest.New(t, append(opts, nodetest.Parallel())...)
}

// newRecorded makes one whose network is of recording plugins: "one", which does what bridge does, and
// others, which hand its result on.
func newRecorded(t *testing.T, config string, others ...string) (*nodetest.Node, *recorder) {
	n := newNode(t, nodetest.NoNetwork(), nodetest.Config(config))
	r := newRecorder(t, n)
	plugins := []nodetest.Object{r.bridge("one")}
	for _, as := range others {
		plugins = append(plugins, r.plugin(as, nil))
	}
	n.WriteConflist("10-test.conflist", plugins...)
	return n, r
}

var check = harness.Check

// wantRefused fails the test unless the pod is refused with an error that says all this.
func wantRefused(t *testing.T, n *nodetest.Node, config *runtimeapi.PodSandboxConfig, says ...string) {
	_, err := run(t, n, config)
	harness.WantError(t, err, says...)
}

func run(t testing.TB, n *nodetest.Node, config *runtimeapi.PodSandboxConfig) (string, error) {
	return runBy(t, n, config, "")
}

func runBy(t testing.TB, n *nodetest.Node, config *runtimeapi.PodSandboxConfig, handler string) (string, error) {
	answer, err := n.Runtime.RunPodSandbox(harness.Limited(t), &runtimeapi.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
	return answer.GetPodSandboxId(), err
}

func stop(t testing.TB, n *nodetest.Node, id string) error {
	return nodetest.Err(t, n.Runtime.StopPodSandbox, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
}

func remove(t testing.TB, n *nodetest.Node, id string) error {
	return nodetest.Err(t, n.Runtime.RemovePodSandbox, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
}

func list(t testing.TB, n *nodetest.Node, filter *runtimeapi.PodSandboxFilter) []*runtimeapi.PodSandbox {
	return nodetest.Call(t, n.Runtime.ListPodSandbox, &runtimeapi.ListPodSandboxRequest{Filter: filter}).Items
}

func podStatus(t testing.TB, n *nodetest.Node, id string) *runtimeapi.PodSandboxStatus {
	return nodetest.Call(t, n.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id}).Status
}

func ready(t testing.TB, n *nodetest.Node, id string) bool {
	return podStatus(t, n, id).State == runtimeapi.PodSandboxState_SANDBOX_READY
}

// podInfo is what the verbose status of a pod shows, as far as tests use it.
type podInfo struct {
	PID                       int
	NetNamespace, CgroupsPath string
	NetNamespaceClosed        bool
	Config, CNIResult         json.RawMessage
	RuntimeSpec               struct{ OCIVersion string }
	Timeline                  []struct{ Step string }
}

func verbose(t testing.TB, n *nodetest.Node, id string) podInfo {
	answer := nodetest.Call(t, n.Runtime.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	var info podInfo
	check(t, json.Unmarshal([]byte(answer.Info["info"]), &info))
	info.CgroupsPath = cgroup.Path(info.CgroupsPath)
	return info
}

func networkReady(t testing.TB, n *nodetest.Node) (ready bool, message string) {
	return condition(t, n, runtimeapi.NetworkReady)
}

func condition(t testing.TB, n *nodetest.Node, kind string) (holds bool, message string) {
	t.Helper()
	for _, condition := range nodetest.Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{}).Status.Conditions {
		if condition.Type == kind {
			return condition.Status, condition.Message
		}
	}
	t.Fatal("Status has no condition " + kind)
	return false, ""
}

// pluginCall is one run of the recording plugin as it saw it.
type pluginCall struct {
	As, Verb, Container, Netns, Interface, Args string
	Config                                      json.RawMessage
}

// recorder is the recording plugin of one node.
type recorder struct {
	t   *testing.T
	n   *nodetest.Node
	dir string // of its records and orders
}

func newRecorder(t *testing.T, n *nodetest.Node) *recorder {
	dir := filepath.Join(n.Dir, "record")
	check(t, os.Mkdir(dir, 0o755))
	return &recorder{t, n, dir}
}

// recording is the plugin (CNI SPEC 1.1). It writes down each call and then does what the file AS.VERB says:
// "fail CODE MESSAGE", "hang", or "wait" until the file is gone, and otherwise what another plugin does.
const recording = `#!/bin/sh
as=${0##*/} does=%s dir=%s
if [ "$CNI_COMMAND" = VERSION ]; then
	echo '{"cniVersion": "1.1.0", "supportedVersions": ["0.4.0", "1.0.0", "1.1.0"]}'
	exit
fi
config=$(cat)
[ -n "$config" ] || exit 1 # its daemon was killed
printf '{"as":"%%s","verb":"%%s","container":"%%s","netns":"%%s","interface":"%%s","args":"%%s","config":%%s}\n' "$as" "$CNI_COMMAND" \
	"$CNI_CONTAINERID" "$CNI_NETNS" "$CNI_IFNAME" "$CNI_ARGS" "$config" >>$dir/calls
while order=$(cat $dir/$as.$CNI_COMMAND 2>/dev/null); [ "$order" = wait ]; do sleep 0.01; done
case $order in
hang)
	sleep 600 & # which holds our pipes, as an IPAM plugin does
	echo "$$ $!" >$dir/hangs
	wait
	exit 1 ;;
fail*)
	set -- $order
	code=$2
	shift 2
	printf '{"cniVersion":"1.1.0","code":%%s,"msg":"%%s"}' "$code" "$*"
	exit 1 ;;
esac
[ $does = bridge ] || [ "$CNI_COMMAND" = ADD ] || exit 0
IFS=:
for path in $CNI_PATH; do
	if [ -x $path/$does ]; then
		printf %%s "$config" | $path/$does
		exit
	fi
done
exit 1
`

// plugin installs the plugin under a name and returns its configuration, with the keys added: it hands on the
// result that it got, as tuning does that has nothing to do.
func (r *recorder) plugin(as string, keys nodetest.Object) nodetest.Object {
	return r.install(as, "tuning", keys)
}

// bridge records and does what the bridge plugin does, but for masquerading: with an empty CNI_NETNS that
// frees the address and leaves the rules.
func (r *recorder) bridge(as string) nodetest.Object {
	config := r.n.BridgePlugin()
	config["ipMasq"] = false
	return r.install(as, "bridge", config)
}

func (r *recorder) install(as, does string, keys nodetest.Object) nodetest.Object {
	path := filepath.Join(r.n.Plugins, as)
	if _, err := os.Stat(path); err != nil {
		check(r.t, os.WriteFile(path, fmt.Appendf(nil, recording, does, r.dir), 0o755))
	}
	config := nodetest.Object{}
	maps.Copy(config, keys)
	config["type"] = as
	return config
}

// order says what the plugin of that name is to do at the verb: "fail CODE MESSAGE", "hang", "wait" for
// another order, or "" for its work.
func (r *recorder) order(as, verb, what string) {
	path := filepath.Join(r.dir, as+"."+verb)
	if what == "" {
		check(r.t, harness.IgnoreMissing(os.Remove(path)))
		return
	}
	check(r.t, os.WriteFile(path+".new", []byte(what), 0o600)) // a plugin that runs reads no half of it
	check(r.t, os.Rename(path+".new", path))
}

// calls are those of the verb so far; of all but STATUS and GC when it is "".
func (r *recorder) calls(verb string) []pluginCall {
	data, err := os.ReadFile(filepath.Join(r.dir, "calls"))
	check(r.t, harness.IgnoreMissing(err))
	var calls []pluginCall
	for line := range bytes.Lines(data[:bytes.LastIndexByte(data, '\n')+1]) { // the last one may be being written
		var call pluginCall
		check(r.t, json.Unmarshal(line, &call))
		if call.Verb == verb || verb == "" && call.Verb != "STATUS" && call.Verb != "GC" {
			calls = append(calls, call)
		}
	}
	return calls
}

// forget clears the record.
func (r *recorder) forget() { check(r.t, os.RemoveAll(filepath.Join(r.dir, "calls"))) }

// sequence is the calls in one line: "ADD one, DEL two".
func sequence(calls []pluginCall) string {
	var words []string
	for _, call := range calls {
		words = append(words, call.Verb+" "+call.As)
	}
	return strings.Join(words, ", ")
}

// addresses are those that host-local has handed out.
func addresses(t *testing.T, n *nodetest.Node) []string {
	entries, err := os.ReadDir(n.Addresses)
	check(t, harness.IgnoreMissing(err))
	var found []string
	for _, entry := range entries {
		if strings.ContainsAny(entry.Name(), ".:") && !strings.HasPrefix(entry.Name(), "last_reserved") {
			found = append(found, entry.Name())
		}
	}
	return found
}

func wantAddresses(t *testing.T, n *nodetest.Node, count int) {
	held := addresses(t, n)
	harness.Want(t, len(held) == count, "want %d addresses in use, host-local has %v", count, held)
}

func wantPods(t *testing.T, n *nodetest.Node, ids ...string) {
	harness.Same(t, "the pods", podIDs(list(t, n, nil)), ids)
}
