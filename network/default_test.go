package network

import (
	"net/netip"
	"os"
	"path/filepath"
	"slices"
	"testing"
)

func TestParseSubnets(t *testing.T) {
	for _, test := range []struct {
		text string
		want []string
	}{
		{"10.1.0.0/16", []string{"10.1.0.0/16"}},
		{"10.1.2.3/16", []string{"10.1.0.0/16"}},
		{"10.1.0.0/16,fd00:1::/64", []string{"10.1.0.0/16", "fd00:1::/64"}},
		{" fd00:1::/64 , 10.1.0.0/16", []string{"fd00:1::/64", "10.1.0.0/16"}},
		{"", nil},
		{"10.1.0.0", nil},
		{"10.1.0.0/33", nil},
		{"10.1.0.0/16,", nil},
		{"ten/8", nil},
	} {
		got, err := ParseSubnets(test.text)
		var text []string
		for _, prefix := range got {
			text = append(text, prefix.String())
		}
		if test.want == nil && err == nil || test.want != nil && (err != nil || !slices.Equal(text, test.want)) {
			t.Errorf("ParseSubnets(%q) = %q, %v, want %q", test.text, text, err, test.want)
		}
	}
}

func bridged(o *Options) {
	o.Default = DefaultNetwork{Enabled: true, Masquerade: true, Name: "embedded", Bridge: "test-br0", DataDir: filepath.Join(o.Root, "addresses")}
}

// The default network waits for a pod CIDR, follows it, keeps it over a
// restart, and gives way to a file.
func TestDefaultNetworkFollowsThePodCIDR(t *testing.T) {
	n := newNode(t, bridged)
	wantError(t, n.ready(t), "no subnet", "pod CIDR")
	for _, cidr := range []string{"10.91.0.0/24", "10.92.0.0/24,fd92::/64"} {
		if err := n.SetPodCIDR(cidr); err != nil {
			t.Fatal(err)
		}
		wantSubnets(t, n, cidr)
	}
	n.reopen(t)
	if n.PodCIDR() != "10.92.0.0/24,fd92::/64" {
		t.Errorf("after a restart the pod CIDR is %q", n.PodCIDR())
	}
	wantSubnets(t, n, "10.92.0.0/24,fd92::/64")
	n.refreshStatus(t.Context())
	if err := n.ready(t); err != nil {
		t.Errorf("not ready: %v", err)
	}

	n.configure(t, "10.conflist", "file", n.script())
	n.Reload()
	if c, err := n.Configuration(); err != nil || c.Name != "file" {
		t.Errorf("a file does not take the place of the default: %v, %v", c, err)
	}
	if err := os.Remove(filepath.Join(n.ConfDir, "10.conflist")); err != nil {
		t.Fatal(err)
	}
	n.Reload()
	wantSubnets(t, n, "10.92.0.0/24,fd92::/64")
}

// What was configured counts before what the kubelet sends.
func TestDefaultNetworkWithASubnet(t *testing.T) {
	n := newNode(t, func(o *Options) {
		bridged(o)
		o.Default.Subnet = "10.93.0.0/24"
	})
	if err := n.SetPodCIDR("10.94.0.0/24"); err != nil {
		t.Fatal(err)
	}
	wantSubnets(t, n, "10.93.0.0/24")
}

func TestDefaultNetworkWithABadSubnet(t *testing.T) {
	n := newNode(t, func(o *Options) {
		bridged(o)
		o.Default.Subnet = "10.93.0.0"
	})
	wantError(t, n.ready(t), `subnet "10.93.0.0"`)
}

// A file that was spoilt costs nothing but the value.
func TestSpoiltPodCIDR(t *testing.T) {
	n := newNode(t, bridged)
	put(t, n.podCIDRFile(), "{half")
	n.reopen(t)
	if n.PodCIDR() != "" {
		t.Errorf("the pod CIDR is %q", n.PodCIDR())
	}
	if err := n.SetPodCIDR("10.91.0.0/24"); err != nil {
		t.Error(err)
	}
	wantSubnets(t, n, "10.91.0.0/24")
}

func wantSubnets(t *testing.T, n *node, subnets string) {
	t.Helper()
	c, err := n.Configuration()
	if err != nil {
		t.Fatal(err)
	}
	if c.Name != "embedded" || c.CNIVersion != "1.1.0" || c.File != "" || !slices.Equal(c.Plugins, []string{"bridge", "portmap"}) {
		t.Errorf("got %+v", c)
	}
	prefixes, err := ParseSubnets(subnets)
	if err != nil {
		t.Fatal(err)
	}
	var ranges [][]map[string]netip.Prefix
	for _, prefix := range prefixes {
		ranges = append(ranges, []map[string]netip.Prefix{{"subnet": prefix}})
	}
	ipam, ok := pluginsOf(t, c)[0]["ipam"].(map[string]any)
	if !ok || marshal(t, ipam["ranges"]) != marshal(t, ranges) {
		t.Errorf("ranges %s, want %s", marshal(t, ipam["ranges"]), marshal(t, ranges))
	}
}
