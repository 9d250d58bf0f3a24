package e2e

import (
	"encoding/json"
	"math"
	"reflect"
	"slices"
	"strings"
	"testing"

	gocni "github.com/containerd/go-cni"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// capabilities are all that a plugin can declare, and more than are given.
var capabilities = harness.Object{
	"portMappings": true, "bandwidth": true, "dns": true, "cgroupPath": true, "io.kubernetes.cri.pod-annotations": true,
	"ipRanges": true, "mac": true, "aliases": true, "deviceID": true,
}

// sortedArgs splits CNI_ARGS; their order has no meaning.
func sortedArgs(args string) []string {
	pairs := strings.Split(args, ";")
	slices.Sort(pairs)
	return pairs
}

func runtimeConfig(t *testing.T, call pluginCall) map[string]json.RawMessage {
	t.Helper()
	var config struct {
		RuntimeConfig map[string]json.RawMessage `json:"runtimeConfig"`
	}
	check(t, json.Unmarshal(call.Config, &config))
	return config.RuntimeConfig
}

// The arguments and capabilities are those that containerd passes.
//
// cri: PodSandboxConfig.annotations PortMapping.host_port PortMapping.protocol
func TestPluginsSeeWhatContainerdPasses(t *testing.T) {
	n := newNode(t, harness.NoNetwork())
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"), r.plugin("two", harness.Object{"capabilities": capabilities}))
	config := n.PodConfig("web", harness.HostPort(8080, 80))
	config.PortMappings = append(config.PortMappings,
		&runtimeapi.PortMapping{Protocol: runtimeapi.Protocol_UDP, HostPort: 53, ContainerPort: 5353, HostIp: "127.0.0.1"},
		&runtimeapi.PortMapping{ContainerPort: 82})
	config.Annotations = map[string]string{"kubernetes.io/ingress-bandwidth": "10M", "kubernetes.io/egress-bandwidth": "1Gi", "other": "x"}
	config.DnsConfig = &runtimeapi.DNSConfig{Servers: []string{"10.96.0.10"}, Searches: []string{"svc"}, Options: []string{"ndots:5"}}
	id := n.RunPod(config)

	calls := r.calls("ADD")
	if sequence(calls) != "ADD one, ADD two" {
		t.Fatalf("got %s", sequence(calls))
	}
	call := calls[1]
	if call.Container != id || call.Interface != "eth0" || call.Netns != verbose(t, n, id).NetNamespace {
		t.Errorf("got %+v", call)
	}
	want := []string{
		"IgnoreUnknown=1", "K8S_POD_INFRA_CONTAINER_ID=" + id, "K8S_POD_NAME=web", "K8S_POD_NAMESPACE=test", "K8S_POD_UID=uid-web",
	}
	if got := sortedArgs(call.Args); !slices.Equal(got, want) {
		t.Errorf("CNI_ARGS are %v", got)
	}
	wantCapabilities(t, runtimeConfig(t, call), map[string]any{
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
	if given := runtimeConfig(t, calls[0]); len(given) != 0 {
		t.Errorf("a plugin that declares no capability got %s", given)
	}
}

func wantCapabilities(t *testing.T, got map[string]json.RawMessage, want map[string]any) {
	t.Helper()
	for name, value := range want {
		encoded, err := json.Marshal(value)
		check(t, err)
		if !sameJSON(t, got[name], encoded) {
			t.Errorf("capability %s: want %s, got %s", name, encoded, got[name])
		}
	}
	if len(got) != len(want) {
		t.Errorf("want %d capabilities, got %s", len(want), got)
	}
}

func sameJSON(t *testing.T, a, b json.RawMessage) bool {
	t.Helper()
	var x, y any
	if len(a) == 0 || len(b) == 0 {
		return len(a) == len(b)
	}
	check(t, json.Unmarshal(a, &x))
	check(t, json.Unmarshal(b, &y))
	return reflect.DeepEqual(x, y)
}

func TestPodThatAsksForNothingHasFewCapabilities(t *testing.T) {
	n := newNode(t, harness.NoNetwork())
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"), r.plugin("two", harness.Object{"capabilities": capabilities}))
	n.RunPod(n.PodConfig("web"))
	given := runtimeConfig(t, r.calls("ADD")[1])
	delete(given, "io.kubernetes.cri.pod-annotations")
	delete(given, "cgroupPath")
	if len(given) != 0 {
		t.Errorf("got %s", given)
	}
}
