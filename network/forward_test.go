package network

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// firewalls are what a node's administrator or another program has in the way of forwarded packets.
var firewalls = []struct{ name, script, undo string }{
	{"policy of iptables-nft", "{4} -P FORWARD DROP; {6} -P FORWARD DROP", ""},
	{
		"policy of iptables-legacy", "{4L} -P FORWARD DROP; {6L} -P FORWARD DROP",
		"{4L} -P FORWARD ACCEPT; {6L} -P FORWARD ACCEPT",
	},
	{"last rule, as on RHEL", `for i in {4} {6}; do
		$i -A FORWARD -i lo -j ACCEPT; $i -A FORWARD -m comment --comment "-j ACCEPT" -j REJECT; done`, ""},
	{
		"last rule of iptables-legacy",
		`for i in {4L} {6L}; do $i -A FORWARD -m comment --comment "the end" -j DROP; done`,
		"{4L} -F; {6L} -F",
	},
	{"Docker", `for i in {4} {6}; do
		for chain in DOCKER DOCKER-FORWARD DOCKER-BRIDGE DOCKER-CT DOCKER-USER; do $i -N $chain; done
		$i -A FORWARD -j DOCKER-USER; $i -A FORWARD -j DOCKER-FORWARD
		$i -A DOCKER-FORWARD -j DOCKER-CT; $i -A DOCKER-FORWARD -j DOCKER-BRIDGE; $i -A DOCKER-FORWARD -i docker0 -j ACCEPT
		$i -A DOCKER-BRIDGE -o docker0 -j DOCKER; $i -A DOCKER ! -i docker0 -o docker0 -j DROP
		$i -A DOCKER-USER -j RETURN; $i -P FORWARD DROP; done`, ""},
	{"ufw", `for i in {4} {6}; do
		for chain in before after reject user; do $i -N ufw-$chain-forward; $i -A FORWARD -j ufw-$chain-forward; done
		$i -A ufw-before-forward -m conntrack --ctstate RELATED,ESTABLISHED -j ACCEPT; $i -A ufw-reject-forward -j REJECT
		$i -P FORWARD DROP; done`, ""},
	{"firewalld", `nft -f - <<-END
		table inet firewalld {
			chain filter_FORWARD {
				type filter hook forward priority filter + 10; policy accept;
				ct state { established, related } accept
				iifname "lo" accept
				jump filter_FORWARD_POLICIES
				reject with icmpx admin-prohibited
			}
			chain filter_FORWARD_POLICIES {
				iifname "eth9" jump filter_FWD_public
				jump filter_FWD_public
			}
			chain filter_FWD_public { reject with icmpx admin-prohibited; }
		}
		END`, ""},
	{"nftables.conf", `nft -f - <<-END
		table inet filter {
			chain forward { type filter hook forward priority 0; policy drop; ct state established accept; }
		}
		table ip6 own { chain f { type filter hook forward priority 5; counter; goto out; }; chain out { log; drop; }; }
		END`, ""},
}

// sh runs a script of the table above.
func sh(t *testing.T, script string) {
	t.Helper()
	programs := strings.NewReplacer("{4}", "iptables-nft", "{6}", "ip6tables-nft",
		"{4L}", "iptables-legacy", "{6L}", "ip6tables-legacy")
	script = programs.Replace(script)
	output, err := exec.Command("sh", "-ec", script).CombinedOutput()
	harness.Need(t, err == nil, "%s\n%v: %s", script, err, output)
}

// filterRules are those of all parts of the packet filter.
func filterRules(t *testing.T) string {
	var all strings.Builder
	all.WriteString(nftRules(t))
	for _, program := range []string{"iptables-legacy", "ip6tables-legacy"} {
		text, err := runFilter(program, "", "-S")
		must(t, err)
		all.WriteString(text)
	}
	return all.String()
}

// reaches waits until a connection from one namespace to an address in another is made.
func reaches(t *testing.T, from, to, address string) {
	t.Helper()
	var listener net.Listener
	in(t, to, func() (err error) {
		listener, err = net.Listen("tcp", net.JoinHostPort(address, "0"))
		return err
	})
	defer listener.Close()
	harness.Eventually(t, "the pod reaches "+address, func() (is bool) {
		in(t, from, func() error {
			connection, err := net.DialTimeout("tcp", listener.Addr().String(), time.Second)
			if err == nil {
				is = connection.Close() == nil
			}
			return nil
		})
		return is
	})
}

// Pods of the embedded network reach each other, and what is outside, whatever drops the node's other packets, made
// before the network or after it, and with both address families. The rules go with the network.
func TestEmbeddedNetworkBesideFirewalls(t *testing.T) {
	n := masqueraded(t, "test-br9", "10.97.9.0/24,fd97:9::/64")
	t.Cleanup(func() { sh(t, "nft flush ruleset; {4L} -F; {6L} -F") })
	outside := newOutside(t, "192.0.2.1/30", "192.0.2.2/30", "2001:db8::1/126", "2001:db8::2/126")
	for _, kind := range []string{"all", "default"} {
		must(t, os.WriteFile("/proc/sys/net/ipv4/conf/"+kind+"/rp_filter", []byte("1"), 0o600))
	}
	stop := n.runs(t)
	connected := func() {
		t.Helper()
		for _, to := range []string{"192.0.2.2", "2001:db8::2"} {
			web, db, six := n.Options.Namespaces.Path("web"), n.Options.Namespaces.Path("db"), strings.Contains(to, ":")
			reaches(t, web, outside, to)
			reaches(t, outside, web, n.addressOf(t, "web", six))
			reaches(t, web, db, n.addressOf(t, "db", six))
		}
	}
	n.attached(t, "web")
	n.attached(t, "db")
	in(t, outside, func() error { // other nodes have a route to the pods
		routes := "ip route add 10.97.9.0/24 via 192.0.2.1; ip -6 route add fd97:9::/64 via 2001:db8::1"
		return exec.Command("sh", "-ec", routes).Run()
	})
	for _, f := range firewalls {
		t.Run(f.name, func(t *testing.T) {
			sh(t, f.script)
			n.forward.refresh() // what iptables-legacy changes, the kernel does not report
			connected()
			before := strings.Count(filterRules(t), n.forward.mark)
			n.forward.refresh()
			harness.Same(t, "the number of rules after another look", strings.Count(filterRules(t), n.forward.mark), before)
			harness.Same(t, "the remark", n.Remark(), "")
			sh(t, "nft flush ruleset; "+f.undo)
			n.forward.refresh()
			connected()
		})
	}
	n.detach(t, "web")
	n.detach(t, "db")
	sh(t, firewalls[0].script+";"+firewalls[3].script)
	n.forward.refresh()
	harness.Want(t, strings.Count(filterRules(t), n.forward.mark) == 8, "the rules: %s", filterRules(t))
	stop()
	n.Close()
	harness.Want(t, !strings.Contains(filterRules(t), n.forward.mark), "the daemon has left rules: %s", filterRules(t))
}

// addressOf returns the pod's address of a family.
func (n *node) addressOf(t *testing.T, id string, six bool) string {
	for _, address := range n.given[id] {
		if address.Is6() == six {
			return address.String()
		}
	}
	t.Fatalf("pod %s has no such address: %v", id, n.given[id])
	return ""
}

// Without nft the rules are made by iptables.
func TestEmbeddedNetworkWithIptablesAlone(t *testing.T) {
	for _, kind := range []string{"nft", "legacy"} {
		t.Run(kind, func(t *testing.T) {
			path, programs := os.Getenv("PATH"), t.TempDir()
			for _, program := range []string{"iptables", "ip6tables", "iptables-save", "ip6tables-save"} {
				named := strings.Replace(program, "tables", "tables-"+kind, 1)
				file, err := exec.LookPath(named)
				must(t, err)
				file, err = filepath.EvalSymlinks(file)
				must(t, err)
				must(t, os.Symlink(file, filepath.Join(programs, named)))
				script := "#!/bin/sh\nexec " + filepath.Join(programs, named) + ` "$@"`
				must(t, os.WriteFile(filepath.Join(programs, program), []byte(script), 0o755))
			}
			sh(t, strings.ReplaceAll("iptables-KIND -P FORWARD DROP; iptables-KIND -A FORWARD -j REJECT", "KIND", kind))
			t.Cleanup(func() {
				must(t, os.Setenv("PATH", path))
				sh(t, strings.ReplaceAll("iptables-KIND -P FORWARD ACCEPT; iptables-KIND -F", "KIND", kind))
			})
			t.Setenv("PATH", programs+":/bin")
			_, err := exec.LookPath("nft")
			harness.Need(t, err != nil, "nft is found: this shows nothing")
			n := masqueraded(t, "test-br5", "10.97.8.0/24")
			n.attached(t, "web")
			must(t, os.Setenv("PATH", path))
			outside := newOutside(t, "192.0.2.1/30", "192.0.2.2/30", "2001:db8::1/126", "2001:db8::2/126")
			reaches(t, n.Options.Namespaces.Path("web"), outside, "192.0.2.2")
			must(t, os.Setenv("PATH", programs+":/bin"))
			n.detach(t, "web")
			n.forward.use(nil)
			must(t, os.Setenv("PATH", path))
			harness.Want(t, !strings.Contains(filterRules(t), n.forward.mark), "rules are left: %s", filterRules(t))
		})
	}
}

// Where no rule can be added, the readiness says so, and what to do.
func TestRulesThatCannotBeAdded(t *testing.T) {
	n := masqueraded(t, "test-br5", "10.97.7.0/24")
	t.Cleanup(func() { sh(t, "nft flush ruleset") })
	sh(t, "{4} -P FORWARD DROP")
	path, nft := os.Getenv("PATH"), t.TempDir()
	script := "#!/bin/sh\ncase $* in *--file*) echo Operation not permitted >&2; exit 1;; esac\n" +
		"PATH=" + path + ` exec nft "$@"`
	must(t, os.WriteFile(filepath.Join(nft, "nft"), []byte(script), 0o755))
	t.Setenv("PATH", nft+":"+path)
	n.forward.refresh()
	for _, want := range []string{"chain FORWARD of table ip filter drops", "Operation not permitted", "10.97.7.0/24"} {
		harness.Want(t, strings.Contains(n.Remark(), want), "the remark %q has no %q", n.Remark(), want)
	}
}
