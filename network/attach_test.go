package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	gocni "github.com/containerd/go-cni"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/minicri/minicri/namespace"
)

// CNI_ARGS and capabilities reach the plugins that declare them, at ADD and
// again at DEL, over a restart too.
func TestArgumentsAndCapabilities(t *testing.T) {
	n := newNode(t, nil)
	plugin := n.script()
	plugin["capabilities"] = map[string]bool{"portMappings": true, "bandwidth": false}
	n.configure(t, "10.conflist", "net", plugin)
	n.journalled(t, "web", func(a *Attachment) {
		must(t, a.SetCapability("portMappings", []PortMapping{{HostPort: 1, ContainerPort: 2, Protocol: "udp"}}))
		must(t, a.SetCapability("bandwidth", BandWidth{IngressRate: 1}))
		must(t, a.SetCapability("dns", DNS{Servers: []string{"::1"}}))
	})
	n.attach(t, "web")
	n.reopen(t)
	n.detach(t, "web")
	for _, verb := range []string{"ADD", "DEL"} {
		calls := n.calls(t, verb)
		if len(calls) != 1 || !strings.Contains(calls[0], "id=web netns="+n.Options.Namespaces.Path("web")) ||
			!strings.Contains(calls[0], "K8S_POD_NAME=web") || !strings.Contains(calls[0], "IgnoreUnknown=1") {
			t.Errorf("%s: %q", verb, calls)
		}
		var stdin struct {
			RuntimeConfig map[string]json.RawMessage
			PrevResult    json.RawMessage
		}
		n.stdin(t, verb, &stdin)
		if len(stdin.RuntimeConfig) != 1 || string(stdin.RuntimeConfig["portMappings"]) != `[{"HostPort":1,"ContainerPort":2,"Protocol":"udp","HostIP":""}]` {
			t.Errorf("%s: capabilities %s", verb, marshal(t, stdin.RuntimeConfig))
		}
		if verb == "DEL" && len(stdin.PrevResult) == 0 {
			t.Error("DEL was not given the result of ADD")
		}
	}
}

func (n *node) stdin(t *testing.T, verb string, into any) {
	t.Helper()
	data, err := os.ReadFile(filepath.Join(n.scripted, verb+".stdin"))
	if err == nil {
		err = json.Unmarshal(data, into)
	}
	must(t, err)
}

func TestAddressesOfEth0(t *testing.T) {
	ip := func(text string) *gocni.IPConfig { return &gocni.IPConfig{IP: net.ParseIP(text)} }
	for _, test := range []struct {
		result gocni.Result
		want   string
	}{
		{gocni.Result{}, "[]"},
		{gocni.Result{Interfaces: map[string]*gocni.Config{"eth1": {IPConfigs: []*gocni.IPConfig{ip("10.0.0.1")}}}}, "[]"},
		{gocni.Result{Interfaces: map[string]*gocni.Config{eth0: {}}}, "[]"},
		{gocni.Result{Interfaces: map[string]*gocni.Config{eth0: {IPConfigs: []*gocni.IPConfig{ip("fd00::1")}}}}, "[fd00::1]"},
		{
			gocni.Result{Interfaces: map[string]*gocni.Config{eth0: {IPConfigs: []*gocni.IPConfig{ip("fd00::1"), ip("fd00::2"), ip("10.0.0.1"), ip("10.0.0.2")}}}},
			"[10.0.0.1 fd00::1 fd00::2 10.0.0.2]",
		},
	} {
		if got := fmt.Sprint(addresses(&test.result)); got != test.want {
			t.Errorf("addresses = %s, want %s", got, test.want)
		}
	}
}

// in runs a function in the network namespace at path.
func in(t *testing.T, path string, do func() error) {
	t.Helper()
	handle, err := netns.GetFromPath(path)
	must(t, err)
	defer handle.Close()
	err = namespace.OnDisposableThread(func() error {
		if err := netns.Set(handle); err != nil {
			return err
		}
		return do()
	})
	must(t, err)
}

func rules(t *testing.T) (rules []string) {
	t.Helper()
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		out, err := exec.Command(program).Output()
		must(t, err)
		rules = append(rules, strings.Split(string(out), "\n")...)
	}
	return rules
}

// without lists what is new and has one of the marks in it.
func without(now, before []string, marks ...string) (left []string) {
	for _, line := range now {
		if slices.ContainsFunc(marks, func(mark string) bool { return strings.Contains(line, mark) }) && !slices.Contains(before, line) {
			left = append(left, line)
		}
	}
	return left
}

func removeLinkAtEnd(t *testing.T, name string) {
	t.Helper()
	t.Cleanup(func() {
		link, err := netlink.LinkByName(name)
		if err == nil {
			err = netlink.LinkDel(link)
		}
		if missing := (netlink.LinkNotFoundError{}); err != nil && !errors.As(err, &missing) {
			t.Error(err)
		}
	})
}

func must(t *testing.T, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
