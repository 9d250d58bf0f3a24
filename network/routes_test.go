package network

import (
	"log/slog"
	"net"
	"net/netip"
	"os"
	"slices"
	"strings"
	"testing"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

// A node whose IPv6 default route comes from router advertisements keeps it when the embedded network has an IPv6
// subnet: forwarding would drop it.
func TestRouteOfRouterAdvertisementsIsKept(t *testing.T) {
	const file = "/proc/sys/net/ipv6/conf/test-ra/accept_ra"
	must(t, netlink.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "test-ra"}, PeerName: "test-router"}))
	removeLinkAtEnd(t, "test-ra")
	link, err := netlink.LinkByName("test-ra")
	must(t, err)
	must(t, netlink.LinkSetUp(link))
	must(t, os.WriteFile(file, []byte("1"), 0))
	_, everything, err := net.ParseCIDR("::/0")
	must(t, err)
	route := &netlink.Route{LinkIndex: link.Attrs().Index, Dst: everything, Protocol: unix.RTPROT_RA}
	must(t, netlink.RouteAdd(route))
	logger := slog.New(slog.DiscardHandler)
	links, err := RouterLinks([]netip.Prefix{netip.MustParsePrefix("fd97::/64")})
	harness.Want(t, err == nil && slices.Contains(links, "test-ra"), "check finds %q, %v", links, err)
	for _, c := range []struct{ subnets, want string }{{"10.97.0.0/24", "1"}, {"fd97::/64", "2"}} {
		must(t, keepRouterRoutes(logger, []netip.Prefix{netip.MustParsePrefix(c.subnets)}))
		harness.Same(t, "accept_ra with "+c.subnets, strings.TrimSpace(string(harness.Read(t, file))), c.want)
	}
}
