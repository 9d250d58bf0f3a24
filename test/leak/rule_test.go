package leak

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

// The real plugins make the rules and remove them: what they leave is the
// clean state, and what they make is found, with either backend.
func TestRulesOfPlugins(t *testing.T) {
	for _, backend := range []string{"iptables", "nftables"} {
		t.Run(backend, func(t *testing.T) {
			inNetns(t)
			pod := start(t, "unshare", "--net", "sleep", "600")
			defer end(t, pod)
			waitForNamespace(t, pod.Process.Pid, "net")
			a := &attachment{
				t: t, netns: fmt.Sprintf("/proc/%d/ns/net", pod.Process.Pid),
				backend: backend, addresses: t.TempDir(),
			}
			scope := Scope{Rules: true, Links: true, AddressDirs: []string{filepath.Join(a.addresses, "leaktest")}}

			a.add()
			a.del()
			clean := take(t, scope)
			if n := clean.Count(Rule); n != 0 {
				t.Errorf("the plugins' own chains count as %d leaks: %v", n, Diff(Snapshot{}, clean))
			}
			a.add()
			tally := Tally(Diff(clean, take(t, scope)))
			if tally[Rule] < 2 || tally[Link] != 1 || tally[Address] != 1 {
				t.Errorf("want rules of masquerade and portmap, a link and an address, got %v", tally)
			}
			a.del()
			if leaks := Diff(clean, take(t, scope)); len(leaks) != 0 {
				t.Errorf("left after DEL: %v", leaks)
			}
		})
	}
}

// attachment runs bridge, portmap and firewall by the CNI protocol, as any
// runtime does.
type attachment struct {
	t                         *testing.T
	netns, backend, addresses string
	result                    string // of bridge's ADD; DEL of firewall does nothing without it
}

func (a *attachment) add() {
	a.result = ""
	a.result = a.plugin("ADD", "bridge", a.bridge())
	a.plugin("ADD", "portmap", a.portmap())
	a.plugin("ADD", "firewall", `"backend":"iptables"`)
}

func (a *attachment) del() {
	a.plugin("DEL", "firewall", `"backend":"iptables"`)
	a.plugin("DEL", "portmap", a.portmap())
	a.plugin("DEL", "bridge", a.bridge())
}

func (a *attachment) bridge() string {
	return fmt.Sprintf(`"bridge":"leakbr0","isGateway":true,"ipMasq":true,"ipMasqBackend":%q,
		"ipam":{"type":"host-local","dataDir":%q,"ranges":[[{"subnet":"10.99.0.0/24"}]]}`, a.backend, a.addresses)
}

func (a *attachment) portmap() string {
	return fmt.Sprintf(`"backend":%q,"runtimeConfig":{"portMappings":
		[{"hostPort":8080,"containerPort":80,"protocol":"tcp"}]}`, a.backend)
}

func (a *attachment) plugin(verb, name, config string) string {
	a.t.Helper()
	dir := os.Getenv("CNI_PATH")
	if dir == "" {
		dir = "../../bin/cni"
	}
	if _, err := os.Stat(filepath.Join(dir, name)); err != nil {
		a.t.Fatalf("the CNI plugin %s is absent, run make setup: %v", name, err)
	}
	if a.result != "" {
		config += `,"prevResult":` + a.result
	}
	cmd := exec.Command(filepath.Join(dir, name))
	cmd.Stdin = strings.NewReader(fmt.Sprintf(`{"cniVersion":"1.0.0","name":"leaktest","type":%q,%s}`, name, config))
	cmd.Env = append(os.Environ(), "CNI_COMMAND="+verb, "CNI_CONTAINERID=c0ffee", "CNI_NETNS="+a.netns,
		"CNI_IFNAME=eth0", "CNI_PATH="+dir)
	out, err := cmd.Output()
	if err != nil {
		a.t.Fatalf("%s %s: %v: %s", name, verb, err, out)
	}
	return string(out)
}

// A chain that attachments share does not count beside one that belongs to one.
func TestStandingRulesDoNotCount(t *testing.T) {
	inNetns(t)
	run(t, "iptables", "-t", "nat", "-N", "CNI-HOSTPORT-DNAT")
	expectLeak(t, Scope{Rules: true}, Rule, "CNI-DN-b115d0f60c93e46bfc23d",
		func() { run(t, "iptables", "-t", "nat", "-N", "CNI-DN-b115d0f60c93e46bfc23d") },
		func() { run(t, "iptables", "-t", "nat", "-X", "CNI-DN-b115d0f60c93e46bfc23d") })
}

func TestTable(t *testing.T) {
	inNetns(t)
	run(t, "nft", "add", "table", "inet", "another")
	expectLeak(t, Scope{Tables: true}, Rule, "table inet minicri-cni-1-masquerade",
		func() { run(t, "nft", "add", "table", "inet", "minicri-cni-1-masquerade") },
		func() { run(t, "nft", "delete", "table", "inet", "minicri-cni-1-masquerade") })
}
