package sandbox

import (
	"os"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestHostnameOfThePod(t *testing.T) {
	node, err := os.Hostname()
	if err != nil {
		t.Fatal(err)
	}
	ofNode := &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
		NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE},
	}}
	for _, test := range []struct {
		config *runtimeapi.PodSandboxConfig
		want   string
	}{
		{&runtimeapi.PodSandboxConfig{Hostname: "web-0"}, "web-0"},
		{&runtimeapi.PodSandboxConfig{}, node},
		{&runtimeapi.PodSandboxConfig{Hostname: "web-0", Linux: ofNode}, node},
	} {
		if got, err := hostnameOf(test.config); err != nil || got != test.want {
			t.Errorf("%v: %q, %v, want %q", test.config, got, err, test.want)
		}
	}
}
