package network

import (
	"net"
	"net/netip"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"

	"github.com/minicri/minicri/test/harness"
)

func bridged(o *Options) {
	o.Default = DefaultNetwork{Enabled: true, Masquerade: true, Name: "embedded", Bridge: "test-br0", DataDir: filepath.Join(o.Root, "addresses")}
}

// With another subnet the bridge is made anew when no pod is on it; while one is, the problem says which, and the
// network is not ready. An address of an administrator's is no subnet.
func TestAnotherSubnetMakesTheBridgeAnew(t *testing.T) {
	n := masqueraded(t, "test-br7", "10.97.0.0/24")
	n.runs(t)
	other := n.Options.Default
	other.Subnet = "10.98.0.0/24"
	n.attached(t, "web")
	n.SetDefault(other)
	n.Reload()
	_, err := n.Configuration()
	harness.WantError(t, err, "test-br7", "10.97.0.1/24", "earlier subnet", "web", "remove")
	reads, last := 0, n.current.Load()
	for began := time.Now(); time.Since(began) < time.Second; time.Sleep(time.Millisecond) {
		if now := n.current.Load(); now != last {
			reads, last = reads+1, now
		}
	}
	harness.Want(t, reads <= 30, "the directory was read %d times in a second", reads)
	n.detach(t, "web")
	_, err = n.Configuration()
	must(t, err)
	n.journalled(t, "db", nil)
	given := n.attach(t, "db").Addresses
	harness.Want(t, len(given) == 1 && netip.MustParsePrefix("10.98.0.0/24").Contains(given[0]), "addresses %v", given)
	link, err := netlink.LinkByName("test-br7")
	must(t, err)
	must(t, netlink.AddrAdd(link, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 98, 0, 200), Mask: net.CIDRMask(24, 32)}}))
	n.Options.Default.Subnet = "10.98.0.0/24"
	n.reopen(t)
	n.runs(t)
	_, err = n.Configuration()
	must(t, err)
	n.detach(t, "db")
	// Over a restart too, where the journal knows who is on it.
	n.attached(t, "web2")
	n.Options.Default.Subnet = "10.99.0.0/24"
	n.reopen(t)
	n.runs(t)
	_, err = n.Configuration()
	harness.WantError(t, err, "10.98.0.1/24", "web2")
	n.detach(t, "web2")
	eventually(t, within, "the network is there", func() bool { _, err := n.Configuration(); return err == nil })
}
