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
		must(t, n.SetPodCIDR(cidr))
		wantSubnets(t, n, cidr)
	}
	n.reopen(t)
	if n.PodCIDR() != "10.92.0.0/24,fd92::/64" {
		t.Errorf("after a restart the pod CIDR is %q", n.PodCIDR())
	}
	wantSubnets(t, n, "10.92.0.0/24,fd92::/64")
	n.refreshStatus()
	if err := n.ready(t); err != nil {
		t.Errorf("not ready: %v", err)
	}

	n.configure(t, "10.conflist", "file", n.script())
	n.Reload()
	if c, err := n.Configuration(); err != nil || c.Name != "file" {
		t.Errorf("a file does not take the place of the default: %v, %v", c, err)
	}
	must(t, os.Remove(filepath.Join(n.ConfDir, "10.conflist")))
	n.Reload()
	wantSubnets(t, n, "10.92.0.0/24,fd92::/64")
}

func wantSubnets(t *testing.T, n *node, subnets string) {
	t.Helper()
	c, err := n.Configuration()
	must(t, err)
	if c.Name != "embedded" || c.CNIVersion != "1.1.0" || c.File != "" || !slices.Equal(c.Plugins, []string{"bridge", "portmap"}) {
		t.Errorf("got %+v", c)
	}
	prefixes, err := ParseSubnets(subnets)
	must(t, err)
	var ranges [][]map[string]netip.Prefix
	for _, prefix := range prefixes {
		ranges = append(ranges, []map[string]netip.Prefix{{"subnet": prefix}})
	}
	ipam, ok := pluginsOf(t, c)[0]["ipam"].(map[string]any)
	if !ok || marshal(t, ipam["ranges"]) != marshal(t, ranges) {
		t.Errorf("ranges %s, want %s", marshal(t, ipam["ranges"]), marshal(t, ranges))
	}
}

// With another subnet the bridge is made anew when no pod is on it; while one is, the
// problem says which, and the network is not ready.
func TestAnotherSubnetMakesTheBridgeAnew(t *testing.T) {
	n := masqueraded(t, "test-br7", "10.97.0.0/24")
	n.runs(t)
	other := n.Options.Default
	other.Subnet = "10.98.0.0/24"
	n.journalled(t, "web", nil)
	n.attach(t, "web")
	n.SetDefault(other)
	n.Reload()
	_, err := n.Configuration()
	wantError(t, err, "test-br7", "10.97.0.1/24", "earlier subnet", "web", "remove")
	n.detach(t, "web")
	eventually(t, within, "the network is there", func() bool { _, err := n.Configuration(); return err == nil })
	n.journalled(t, "db", nil)
	if result := n.attach(t, "db"); len(result.Addresses) != 1 || !netip.MustParsePrefix("10.98.0.0/24").Contains(result.Addresses[0]) {
		t.Errorf("addresses %v", result.Addresses)
	}
	n.detach(t, "db")
	// Over a restart too, where the journal knows who is on it.
	n.journalled(t, "web2", nil)
	n.attach(t, "web2")
	n.Options.Default.Subnet = "10.99.0.0/24"
	n.reopen(t)
	n.runs(t)
	_, err = n.Configuration()
	wantError(t, err, "10.98.0.1/24", "web2")
	n.detach(t, "web2")
	eventually(t, within, "the network is there", func() bool { _, err := n.Configuration(); return err == nil })
}
