package network

import (
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/minicri/minicri/test/harness"
)

// masqueraded opens the embedded network with a bridge of the test's own.
func masqueraded(t *testing.T, bridge, subnet string) *node {
	n := newNode(t, func(o *Options) {
		bridged(o)
		o.Default.Bridge, o.Default.Subnet = bridge, subnet
	})
	removeLinkAtEnd(t, bridge)
	t.Cleanup(func() { _, _ = nft("", "delete", "table", "inet", n.masquerade.table) })
	return n
}

// What pods send out of the network has the node's address, what they send to each other
// has theirs; no pod makes a rule.
func TestOneRuleMasqueradesAllPods(t *testing.T) {
	n := masqueraded(t, "test-br3", "10.97.0.0/24,fd97::/64")
	outside := newOutside(t, "192.0.2.1/30", "192.0.2.2/30", "2001:db8::1/126", "2001:db8::2/126")
	before := nftRules(t)
	n.journalled(t, "web", nil)
	n.journalled(t, "db", nil)
	web, db := n.attach(t, "web"), n.attach(t, "db")
	harness.Same(t, "the rules beside two pods", nftRules(t), before)
	from := n.Options.Namespaces.Path("web")
	wantSources := func() {
		for to, want := range map[string]netip.Addr{
			"192.0.2.2": netip.MustParseAddr("192.0.2.1"), "2001:db8::2": netip.MustParseAddr("2001:db8::1"),
		} {
			harness.Same(t, "what the pod sends to "+to+" comes from", source(t, from, outside, to), want)
		}
		for i, to := range db.Addresses {
			got := source(t, from, n.Options.Namespaces.Path("db"), to.String())
			harness.Want(t, got == web.Addresses[i], "what the pod sends to the pod %v comes from %v, want %v", to, got, web.Addresses[i])
		}
	}
	wantSources()
	n.detach(t, "web")
	n.detach(t, "db")
}

// Pods keep masquerading when the default network gets another subnet, or gives way to
// a file; the rule goes with the last of them, also when that ends under a later daemon.
func TestTheRuleGoesWithTheLastPod(t *testing.T) {
	n := masqueraded(t, "test-br4", "10.98.0.0/24")
	stop := n.runs(t)
	n.journalled(t, "old", nil)
	other := n.Default
	other.Subnet = "10.99.0.0/24"
	n.SetDefault(other)
	harness.Eventually(t, "the default network has the other subnet", func() bool {
		c, err := n.Configuration()
		want := []netip.Prefix{netip.MustParsePrefix("10.99.0.0/24")}
		return err == nil && slices.Equal(subnetsOf(c.Bytes, masqueradeKey), want)
	})
	n.wantMasqueraded(t, "10.98.0.0/24", "10.99.0.0/24")
	n.configure(t, "10.conflist", "file", n.script())
	n.wantMasqueraded(t, "10.98.0.0/24")
	stop()
	n.reopen(t)
	n.wantMasqueraded(t, "10.98.0.0/24")
	n.runs(t)
	n.wantMasqueraded(t, "10.98.0.0/24")
	n.detach(t, "old")
	n.wantMasqueraded(t)
}

// A daemon whose last pod is gone leaves no table behind: a network that the node gets
// afterwards may have the same subnet. One that leaves pods leaves it.
func TestTheRuleGoesWithTheDaemon(t *testing.T) {
	n := masqueraded(t, "test-br7", "10.98.3.0/24")
	stop := n.runs(t)
	n.journalled(t, "left", nil)
	stop()
	n.wantMasqueraded(t, "10.98.3.0/24")
	n.reopen(t)
	stop = n.runs(t)
	n.detach(t, "left")
	n.wantMasqueraded(t, "10.98.3.0/24") // for the next pod
	stop()
	n.wantMasqueraded(t)
}

// Without nft the bridge plugin masquerades, with rules for each pod; its DEL takes
// them back when the daemon after that makes one for all.
func TestPodsFromBeforeTheOneRule(t *testing.T) {
	path, programs := os.Getenv("PATH"), t.TempDir()
	for _, program := range []string{"iptables", "ip6tables", "iptables-save", "ip6tables-save"} {
		file, err := exec.LookPath(program)
		must(t, err)
		must(t, os.Symlink(file, filepath.Join(programs, program)))
	}
	t.Setenv("PATH", programs)
	n := masqueraded(t, "test-br6", "10.98.2.0/24")
	before := rules(t)
	n.attached(t, "old")
	harness.Want(t, len(without(rules(t), before, "old")) > 0, "the bridge plugin has made no rules")
	must(t, os.Setenv("PATH", path))
	n.reopen(t)
	n.wantMasqueraded(t, "10.98.2.0/24")
	n.detach(t, "old")
	harness.Same(t, "rules left", without(rules(t), before, "old", "CNI-"), nil)
}

// wantMasqueraded waits until the table masquerades these subnets and no others.
func (n *node) wantMasqueraded(t *testing.T, subnets ...string) {
	harness.Eventually(t, "masqueraded is "+strings.Join(subnets, ", "), func() bool {
		shown, err := exec.Command("nft", "list", "table", "inet", n.masquerade.table).Output()
		if len(subnets) == 0 {
			return err != nil
		}
		for _, subnet := range subnets {
			if !strings.Contains(string(shown), "saddr "+subnet+" ") {
				return false
			}
		}
		return strings.Count(string(shown), " masquerade") == len(subnets)
	})
}

func nftRules(t *testing.T) string {
	rules, err := nft("", "--stateless", "list", "ruleset")
	must(t, err)
	return rules
}

// newOutside is a network namespace beside the node, linked with it: the addresses of
// both ends, the node's first, of each family.
func newOutside(t *testing.T, addresses ...string) (path string) {
	namespaces := newNamespaces(t, "out-")
	must(t, namespaces.Create("outside"))
	path = namespaces.Path("outside")
	handle, err := netns.GetFromPath(path)
	must(t, err)
	defer handle.Close()
	veth := &netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "test-out"}, PeerName: "up", PeerNamespace: netlink.NsFd(handle)}
	must(t, netlink.LinkAdd(veth))
	removeLinkAtEnd(t, "test-out")
	up := func(name string, addresses ...string) error {
		link, err := netlink.LinkByName(name)
		if err != nil {
			return err
		}
		for _, text := range addresses {
			address, err := netlink.ParseAddr(text)
			if err != nil {
				return err
			}
			address.Flags = noDAD
			if err := netlink.AddrAdd(link, address); err != nil {
				return err
			}
		}
		return netlink.LinkSetUp(link)
	}
	must(t, up("test-out", addresses[0], addresses[2]))
	in(t, path, func() error { return up("up", addresses[1], addresses[3]) })
	return path
}

// noDAD is IFA_F_NODAD: the address can be used at once.
const noDAD = 0x02

// source is the address from which what one namespace sends comes to an address in another one.
func source(t *testing.T, from, to, address string) netip.Addr {
	var listener net.Listener
	in(t, to, func() (err error) {
		listener, err = net.Listen("tcp", net.JoinHostPort(address, "0"))
		return err
	})
	defer listener.Close()
	var connection net.Conn
	in(t, from, func() (err error) {
		connection, err = net.DialTimeout("tcp", listener.Addr().String(), within)
		return err
	})
	defer connection.Close()
	must(t, listener.(*net.TCPListener).SetDeadline(time.Now().Add(within)))
	accepted, err := listener.Accept()
	must(t, err)
	defer accepted.Close()
	return netip.MustParseAddrPort(accepted.RemoteAddr().String()).Addr().Unmap()
}

// An nft that fails once at the start is tried again, and rules that are flushed are back at once, whatever the period.
func TestTheRuleIsBackAtOnce(t *testing.T) {
	n := masqueraded(t, "test-br8", "10.97.0.0/24")
	path := os.Getenv("PATH")
	once := t.TempDir()
	script := "#!/bin/sh\n[ -e " + once + "/failed ] || { touch " + once + "/failed; echo busy >&2; exit 1; }\nPATH='" + path + "' exec nft \"$@\"\n"
	must(t, os.WriteFile(filepath.Join(once, "nft"), []byte(script), 0o755))
	t.Setenv("PATH", once+":"+path)
	n.Options.Limits.StatusPeriod = time.Hour
	n.reopen(t)
	n.runs(t)
	n.wantMasqueraded(t, "10.97.0.0/24")
	for range 3 {
		flushed, err := exec.CommandContext(t.Context(), "nft", "flush", "ruleset").CombinedOutput()
		harness.Need(t, err == nil, "%v: %s", err, flushed)
		n.wantMasqueraded(t, "10.97.0.0/24")
	}
}

// An nft that hangs, or one whose child holds its output, is ended at its limit.
func TestNftThatHangs(t *testing.T) {
	bin := t.TempDir()
	must(t, os.WriteFile(filepath.Join(bin, "nft"), []byte("#!/bin/sh\nsleep 600 &\necho $! >"+bin+"/child\nwait\n"), 0o755))
	t.Setenv("PATH", bin+":"+os.Getenv("PATH"))
	t.Cleanup(func() {
		text, _ := os.ReadFile(filepath.Join(bin, "child"))
		if child, err := strconv.Atoi(strings.TrimSpace(string(text))); err == nil && child > 1 {
			_ = syscall.Kill(child, syscall.SIGKILL)
		}
	})
	_, err := nft("", "list", "ruleset")
	harness.Want(t, err != nil, "it succeeded")
}
