package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"os"
	"reflect"
	"slices"
	"strings"
	"testing"

	gocni "github.com/containerd/go-cni"
	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// capabilities are all that a plugin can declare, and more than are given.
var capabilities = nodetest.Object{
	"portMappings": true, "bandwidth": true, "dns": true, "cgroupPath": true, "io.kubernetes.cri.pod-annotations": true,
	"ipRanges": true, "mac": true, "aliases": true, "deviceID": true,
}

// sortedArgs splits CNI_ARGS; their order has no meaning.
func sortedArgs(args string) []string {
	pairs := strings.Split(args, ";")
	slices.Sort(pairs)
	return pairs
}

func decoded(t *testing.T, text []byte) (value map[string]any) {
	check(t, json.Unmarshal(text, &value))
	return value
}

func runtimeConfig(t *testing.T, call pluginCall) map[string]any {
	given, _ := decoded(t, call.Config)["runtimeConfig"].(map[string]any)
	return given
}

// The arguments and capabilities are those that containerd passes.
//
// cri: PodSandboxConfig.annotations PortMapping.host_port PortMapping.protocol
func TestPluginsSeeWhatContainerdPasses(t *testing.T) {
	n := newNode(t, nodetest.NoNetwork())
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"), r.plugin("two", nodetest.Object{"capabilities": capabilities}))
	config := n.PodConfig("web", nodetest.HostPort(8080, 80))
	config.PortMappings = append(config.PortMappings,
		&runtimeapi.PortMapping{Protocol: runtimeapi.Protocol_UDP, HostPort: 53, ContainerPort: 5353, HostIp: "127.0.0.1"},
		&runtimeapi.PortMapping{ContainerPort: 82})
	config.Annotations = map[string]string{"kubernetes.io/ingress-bandwidth": "10M", "kubernetes.io/egress-bandwidth": "1Gi", "other": "x"}
	config.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"10.96.0.10"}, Searches: []string{"svc"}, Options: []string{"ndots:5"}}
	id := n.RunPod(config)

	calls := r.calls("ADD")
	harness.Same(t, "calls", sequence(calls), "ADD one, ADD two")
	call := calls[1]
	harness.Want(t, call.Container == id && call.Interface == "eth0" && call.Netns == verbose(t, n, id).NetNamespace, "got %+v", call)
	want := []string{
		"IgnoreUnknown=1", "K8S_POD_INFRA_CONTAINER_ID=" + id, "K8S_POD_NAME=web", "K8S_POD_NAMESPACE=test", "K8S_POD_UID=uid-web",
	}
	harness.Same(t, "CNI_ARGS", sortedArgs(call.Args), want)
	capabilities, err := json.Marshal(map[string]any{
		"portMappings": []gocni.PortMapping{
			{HostPort: 8080, ContainerPort: 80, Protocol: "tcp"}, {HostPort: 53, ContainerPort: 5353, Protocol: "udp", HostIP: "127.0.0.1"},
		},
		"bandwidth": gocni.BandWidth{
			IngressRate: 10_000_000, IngressBurst: math.MaxUint32, EgressRate: 1 << 30, EgressBurst: math.MaxUint32,
		},
		"dns":                               gocni.DNS{Servers: []string{"10.96.0.10"}, Searches: []string{"svc"}, Options: []string{"ndots:5"}},
		"cgroupPath":                        n.CgroupParent,
		"io.kubernetes.cri.pod-annotations": config.Annotations,
	})
	check(t, err)
	given := runtimeConfig(t, call)
	harness.Want(t, reflect.DeepEqual(given, decoded(t, capabilities)), "want the capabilities %s, got %v", capabilities, given)
	harness.Same(t, "those of a plugin that declares none", len(runtimeConfig(t, calls[0])), 0)
	n.RunPod(n.PodConfig("bare"))
	given = runtimeConfig(t, r.calls("ADD")[3])
	delete(given, "io.kubernetes.cri.pod-annotations")
	delete(given, "cgroupPath")
	harness.Want(t, len(given) == 0, "a pod that asks for nothing gives %s", given)
}

func TestProperty11_ChainThatFailsInTheMiddle(t *testing.T) {
	n, r := newRecorded(t, "", "two", "three")
	r.order("two", "ADD", "fail 42 no more cheese")
	wantRefused(t, n, n.PodConfig("web"), "plugin two", "ADD", "42", "no more cheese")
	harness.Same(t, "calls", sequence(r.calls("")), "ADD one, ADD two, DEL three, DEL two, DEL one")
	for _, call := range r.calls("DEL") {
		first := r.calls("ADD")[0]
		harness.Want(t, call.Container == first.Container && call.Netns == first.Netns && slices.Equal(sortedArgs(call.Args), sortedArgs(first.Args)), "DEL was called with %+v, ADD with %+v", call, first)
	}
	wantAddresses(t, n, 0)
	wantPods(t, n)
	r.order("two", "ADD", "")
	n.RunPod(n.PodConfig("web"))
}

func TestProperty11_ChainThatFailsInTheMiddleAndWithDEL(t *testing.T) {
	n, r := newRecorded(t, fast, "two")
	r.order("two", "ADD", "fail 42 no")
	r.order("two", "DEL", "fail 43 not now")
	wantRefused(t, n, n.PodConfig("web"))
	// The plugin that fails does not keep the other one from its DEL, and is asked until it succeeds.
	wantAddresses(t, n, 0)
	pending := func() bool { return strings.Contains(statusInfo(t, n)["pendingAttachments"], "not now") }
	harness.Eventually(t, "the attachment is pending", pending)
	r.order("two", "ADD", "")
	// The name is not blocked by what is being released.
	n.RunPod(n.PodConfig("web"))
	r.order("two", "DEL", "")
	harness.Eventually(t, "the attachment is released", func() bool { return !pending() })
	wantAddresses(t, n, 1)
}

func TestAddressIsNeeded(t *testing.T) {
	n := newNode(t, nodetest.NoNetwork())
	r := newRecorder(t, n)
	bridge := r.bridge("one")
	bridge["ipam"], bridge["isGateway"] = nodetest.Object{}, false
	n.WriteConflist("10-test.conflist", bridge)
	wantRefused(t, n, n.PodConfig("web"), "address")
	harness.Same(t, "calls", sequence(r.calls("")), "ADD one, DEL one")
}

func TestProperty19_DELHasTheConfigurationOfADD(t *testing.T) {
	for name, change := range harness.Sorted(map[string]func(n *nodetest.Node, file string) error{
		"other network": func(_ *nodetest.Node, file string) error {
			return os.WriteFile(file, []byte(`{"cniVersion": "1.1.0", "name": "other", "plugins": [{"type": "loopback"}]}`), 0o644)
		},
		"plugin gone": func(n *nodetest.Node, _ string) error {
			n.WriteConflist("10-test.conflist", n.BridgePlugin())
			return nil
		},
		"broken":         func(_ *nodetest.Node, file string) error { return os.WriteFile(file, []byte("{"), 0o644) },
		"file gone":      func(_ *nodetest.Node, file string) error { return os.Remove(file) },
		"directory gone": func(n *nodetest.Node, _ string) error { return os.RemoveAll(n.CNIConf) },
	}) {
		for _, restart := range []bool{false, true} {
			t.Run(name, func(t *testing.T) { detachAfter(t, change, restart) })
		}
	}
}

func detachAfter(t *testing.T, change func(*nodetest.Node, string) error, restart bool) {
	n := newNode(t, nodetest.NoNetwork(), nodetest.Config(fast))
	r := newRecorder(t, n)
	file := n.WriteConflist("10-test.conflist", r.bridge("one"), r.plugin("two", nodetest.Object{"capabilities": capabilities}))
	id := n.RunPod(n.PodConfig("web", nodetest.HostPort(8080, 80)))
	before := currentNetwork(t, n)
	check(t, change(n, file))
	harness.Eventually(t, "the daemon sees the change", func() bool {
		return currentNetwork(t, n) != before || strings.Contains(statusInfo(t, n)["networkProblems"], file)
	})
	if restart {
		n.Crash()
	}
	check(t, stop(t, n, id))
	add, del := r.calls("ADD"), r.calls("DEL")
	harness.Same(t, "calls", sequence(del), "DEL two, DEL one")
	for i, call := range del {
		first := add[len(add)-1-i]
		harness.Want(t, slices.Equal(sortedArgs(call.Args), sortedArgs(first.Args)) && call.Netns == first.Netns && call.Interface == first.Interface, "DEL was called with %+v, ADD with %+v", call, first)
		given, was := decoded(t, call.Config), decoded(t, first.Config)
		delete(given, "prevResult") // which the chain adds
		delete(was, "prevResult")
		harness.Want(t, reflect.DeepEqual(given, was), "the configuration of DEL is %s, that of ADD %s", call.Config, first.Config)
	}
	wantAddresses(t, n, 0)
	check(t, os.MkdirAll(n.CNIConf, 0o755))
}

// currentNetwork is the configuration in effect, "" if there is none.
func currentNetwork(t *testing.T, n *nodetest.Node) string { return statusInfo(t, n)["cniconfig"] }

func statusInfo(t *testing.T, n *nodetest.Node) map[string]string {
	return nodetest.Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{Verbose: true}).Info
}

// begin calls RunPodSandbox, and gives its error later.
func begin(ctx context.Context, n *nodetest.Node, config *runtimeapi.PodSandboxConfig) <-chan error {
	failed := make(chan error, 1)
	go func() {
		_, err := n.Runtime.RunPodSandbox(ctx, &runtimeapi.RunPodSandboxRequest{Config: config})
		failed <- err
	}()
	return failed
}

// While an ADD hangs everything else works, a change of the network included.
//
// cri: PodSandboxStatusRequest.verbose StatusRequest.verbose
func TestProperty14_HangingADD(t *testing.T) {
	n, r := newRecorded(t, fast, "two")
	other := n.RunPod(n.PodConfig("other"))

	r.order("two", "ADD", "hang")
	failed := begin(context.Background(), n, n.PodConfig("hangs"))
	pids := r.hung()
	r.order("two", "ADD", "")
	statusInfo(t, n)
	list(t, n, nil)
	verbose(t, n, other)
	n.RemovePod(n.RunPod(n.PodConfig("third")))
	n.WriteConflist("10-test.conflist", r.bridge("one"), r.plugin("two", nodetest.Object{"new": true}))
	harness.Eventually(t, "the new configuration is in effect", func() bool {
		return strings.Contains(fmt.Sprint(nodetest.Info[any](t, n, "cniconfig")), "new")
	})
	building := nodetest.Info[[]struct {
		Name  string
		Stage struct{ Step string }
	}](t, n, "building")
	harness.Want(t, len(building) == 1 && building[0].Name == "test/hangs" && building[0].Stage.Step == "cni add",
		"the verbose status says that is being built: %+v", building)
	harness.Want(t, alive(pids[0]), "the ADD does not hang any more")

	// A plugin that is killed by another one fails like any other.
	check(t, unix.Kill(pids[1], unix.SIGKILL))
	harness.WantError(t, <-failed, "plugin two", "ADD")
	harness.Eventually(t, "only the other pod has an address", func() bool { return len(addresses(t, n)) == 1 })
}

func TestProperty15_CancelledInTheMiddleOfADD(t *testing.T) {
	n, r := newRecorded(t, "")
	r.order("one", "ADD", "wait")
	ctx, cancel := context.WithCancel(context.Background())
	first := begin(ctx, n, n.PodConfig("web"))
	harness.Eventually(t, "ADD runs", func() bool { return len(r.calls("ADD")) == 1 })
	cancel()
	harness.WantError(t, <-first) // of the caller that gave up
	wantPods(t, n)
	r.order("one", "ADD", "")
	// The work went on and is handed to the retry.
	id := n.RunPod(n.PodConfig("web"))
	got := r.calls("ADD")
	harness.Want(t, len(got) == 1 && got[0].Container == id, "pod %s, plugin calls %s", id, sequence(got))
}

// cri: RunPodSandboxRequest.config
func TestProperty16_DuplicatesAreJoined(t *testing.T) {
	n, r := newRecorded(t, "")
	r.order("one", "ADD", "wait")
	first, giveUp := context.WithCancel(context.Background())
	begin(first, n, n.PodConfig("web"))
	harness.Eventually(t, "ADD runs", func() bool { return len(r.calls("ADD")) == 1 })

	answers := make([]string, 20)
	giveUp()
	each(len(answers), func(i int) {
		if i == 0 {
			r.order("one", "ADD", "")
		}
		var err error
		answers[i], err = run(t, n, n.PodConfig("web"))
		harness.Want(t, err == nil, "%v", err)
	})
	for _, id := range answers {
		harness.Want(t, id != "" && id == answers[0], "several pods: %v", answers)
	}
	harness.Same(t, "asked again", n.RunPod(n.PodConfig("web")), answers[0])
	// Who asks for a name that exists with other namespaces gets no pod of another kind.
	_, err := run(t, n, n.PodConfig("web", nodetest.HostNetwork()))
	nodetest.WantCode(t, err, codes.AlreadyExists, "config.hostname differs")
	_, err = run(t, n, n.PodConfig("web", func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.Seccomp = &runtimeapi.SecurityProfile{} }))
	nodetest.WantCode(t, err, codes.AlreadyExists, "config.linux.security_context.seccomp differs")
	wantPods(t, n, answers[0])
	harness.Want(t, len(r.calls("ADD")) == 1, "ADD ran %d times", len(r.calls("ADD")))
}

// cri: PodSandboxNetworkStatus.ip PodSandboxStatus.network
func TestProperty26_ManyPodsAtOnce(t *testing.T) {
	n := newNode(t, nodetest.DualStack())
	const count = 50
	pods := make([]string, count)
	each(count, func(i int) {
		var err error
		pods[i], err = run(t, n, n.PodConfig(fmt.Sprint("pod-", i)))
		harness.Want(t, err == nil, "%v", err)
	})
	seen := map[string]bool{}
	for _, id := range pods {
		seen[podStatus(t, n, id).Network.Ip] = true
	}
	harness.Want(t, len(seen) == count && len(list(t, n, nil)) == count && len(addresses(t, n)) == 2*count,
		"%d addresses, %d pods, host-local has %d", len(seen), len(list(t, n, nil)), len(addresses(t, n)))
	each(count, func(i int) {
		harness.Same(t, "the end of a pod", errors.Join(stop(t, n, pods[i]), remove(t, n, pods[i])), nil)
	})
}
