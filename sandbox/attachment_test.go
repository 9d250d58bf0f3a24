package sandbox

import (
	"bytes"
	"encoding/json"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/network"
)

// CNI_ARGS and capabilities, as the plugins of a Kubernetes node expect them.
func TestNewAttachment(t *testing.T) {
	config := goodConfig()
	config.PortMappings = append(config.PortMappings, &runtimeapi.PortMapping{ContainerPort: 9090})
	sb := newSandbox(Record{ID: "4e5f"}, config)
	a, err := newAttachment(sb, &network.Configuration{Name: "net", Bytes: []byte(`{"name":"net"}`)})
	must(t, err)
	if a.ID != "4e5f" || a.Network != "net" || string(a.Config) != `{"name":"net"}` {
		t.Errorf("attachment %+v", a)
	}
	wantJSON(t, "arguments", a.Args, `{
		"IgnoreUnknown": "1", "K8S_POD_NAMESPACE": "default", "K8S_POD_NAME": "web-0",
		"K8S_POD_INFRA_CONTAINER_ID": "4e5f", "K8S_POD_UID": "3f0c-11"}`)
	wantJSON(t, "capabilities", a.Capabilities, `{
		"portMappings": [
			{"HostPort": 8080, "ContainerPort": 80, "Protocol": "tcp", "HostIP": ""},
			{"HostPort": 65535, "ContainerPort": 53, "Protocol": "udp", "HostIP": "127.0.0.1"}],
		"bandwidth": {"IngressRate": 10000000, "IngressBurst": 4294967295, "EgressRate": 1073741824, "EgressBurst": 4294967295},
		"dns": {"Servers": ["10.96.0.10", "fd00::a"], "Searches": ["svc.local"], "Options": ["ndots:5"]},
		"cgroupPath": "/kubepods/pod3f0c",
		"io.kubernetes.cri.pod-annotations": {"any": "thing\n", "kubernetes.io/egress-bandwidth": "1Gi", "kubernetes.io/ingress-bandwidth": "10M"}}`)
}

// What a pod does not ask for is not a capability that it has.
func TestNewAttachmentOfABarePod(t *testing.T) {
	sb := newSandbox(Record{ID: "4e5f"}, &runtimeapi.PodSandboxConfig{Metadata: &runtimeapi.PodSandboxMetadata{Name: "a"}})
	a, err := newAttachment(sb, &network.Configuration{Name: "net", Bytes: []byte(`{}`)})
	must(t, err)
	wantJSON(t, "capabilities", a.Capabilities, `{"io.kubernetes.cri.pod-annotations": null}`)
}

func wantJSON(t *testing.T, what string, got any, want string) {
	t.Helper()
	data, err := json.Marshal(got)
	must(t, err)
	if canonical(t, data) != canonical(t, []byte(want)) {
		t.Errorf("%s:\n got %s\nwant %s", what, canonical(t, data), canonical(t, []byte(want)))
	}
}

// canonical sorts the keys.
func canonical(t *testing.T, data []byte) string {
	t.Helper()
	decoder := json.NewDecoder(bytes.NewReader(data))
	decoder.UseNumber()
	var value any
	must(t, decoder.Decode(&value))
	sorted, err := json.Marshal(value)
	must(t, err)
	return string(sorted)
}
