package sandbox

import (
	"os"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func TestResolvConf(t *testing.T) {
	for _, test := range []struct {
		name string
		dns  *runtimeapi.DNSConfig
		want string
	}{
		{"nothing: a pod that does not resolve", &runtimeapi.DNSConfig{}, ""},
		{"one server", &runtimeapi.DNSConfig{Servers: []string{"10.96.0.10"}}, "nameserver 10.96.0.10\n"},
		{
			"all, in their order",
			&runtimeapi.DNSConfig{
				Servers:  []string{"10.96.0.10", "fd00::a"},
				Searches: []string{"default.svc.cluster.local", "svc.cluster.local"},
				Options:  []string{"ndots:5", "edns0"},
			},
			"search default.svc.cluster.local svc.cluster.local\nnameserver 10.96.0.10\nnameserver fd00::a\noptions ndots:5 edns0\n",
		},
	} {
		if got := string(resolvConf(test.dns)); got != test.want {
			t.Errorf("%s:\n got %q\nwant %q", test.name, got, test.want)
		}
	}
}

// A pod without a DNSConfig resolves as the node does.
func TestResolvConfOfThePod(t *testing.T) {
	node, err := os.ReadFile("/etc/resolv.conf")
	if err != nil && !os.IsNotExist(err) {
		t.Fatal(err)
	}
	for _, test := range []struct {
		dns  *runtimeapi.DNSConfig
		want string
	}{
		{nil, string(node)},
		{&runtimeapi.DNSConfig{Servers: []string{"::1"}}, "nameserver ::1\n"},
	} {
		if got, err := resolvConfOf(test.dns); err != nil || string(got) != test.want {
			t.Errorf("%v: %q, %v, want %q", test.dns, got, err, test.want)
		}
	}
}

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
