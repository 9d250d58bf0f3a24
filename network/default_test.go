package network

import (
	"net/netip"
	"path/filepath"
	"testing"
)

func bridged(o *Options) {
	o.Default = DefaultNetwork{Enabled: true, Masquerade: true, Name: "embedded", Bridge: "test-br0", DataDir: filepath.Join(o.Root, "addresses")}
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
