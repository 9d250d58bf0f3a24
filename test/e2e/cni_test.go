package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	gocni "github.com/containerd/go-cni"
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
	harness.Want(t, call.Container == id, "got %+v", call)
	harness.Want(t, call.Interface == "eth0", "got %+v", call)
	harness.Want(t, call.Netns == verbose(t, n, id).NetNamespace, "got %+v", call)
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
		harness.Want(t, call.Container == first.Container, "DEL was called with %+v, ADD with %+v", call, first)
		harness.Want(t, call.Netns == first.Netns, "DEL was called with %+v, ADD with %+v", call, first)
		harness.Want(t, slices.Equal(sortedArgs(call.Args), sortedArgs(first.Args)),
			"DEL was called with %+v, ADD with %+v", call, first)
	}
	wantAddresses(t, n, 0)
	wantPods(t, n)
	r.order("two", "ADD", "")
	n.RunPod(n.PodConfig("web"))
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
	harness.Want(t, len(seen) == count,
		"%d addresses, %d pods, host-local has %d", len(seen), len(list(t, n, nil)), len(addresses(t, n)))
	harness.Want(t, len(list(t, n, nil)) == count,
		"%d addresses, %d pods, host-local has %d", len(seen), len(list(t, n, nil)), len(addresses(t, n)))
	harness.Want(t, len(addresses(t, n)) == 2*count,
		"%d addresses, %d pods, host-local has %d", len(seen), len(list(t, n, nil)), len(addresses(t, n)))
	each(count, func(i int) {
		harness.Same(t, "the end of a pod", errors.Join(stop(t, n, pods[i]), remove(t, n, pods[i])), nil)
	})
}
