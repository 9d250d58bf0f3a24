package network

import (
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"net/netip"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	gocni "github.com/containerd/go-cni"
	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"

	"github.com/minicri/minicri/namespace"
)

// The embedded network with its real plugins: two families, a host port, and
// nothing left.
func TestAttachAndDetachWithRealPlugins(t *testing.T) {
	n := newNode(t, func(o *Options) {
		bridged(o)
		o.Default.Bridge, o.Default.Subnet = "test-br1", "fd95::/64,10.95.0.0/24"
	})
	removeLinkAtEnd(t, "test-br1")
	rulesBefore, linksBefore := rules(t), links(t)
	n.journalled(t, "web", func(a *Attachment) {
		must(t, a.SetCapability("portMappings", []PortMapping{{HostPort: 8095, ContainerPort: 80, Protocol: "tcp"}}))
	})
	n.journalled(t, "db", nil)
	web, db := n.attach(t, "web"), n.attach(t, "db")

	for name, result := range map[string]*Result{"web": web, "db": db} {
		if len(result.Addresses) != 2 || !result.Addresses[0].Is4() || !result.Addresses[1].Is6() || len(result.Raw) != 1 {
			t.Fatalf("%s got %+v, want an IPv4 address first and an IPv6 one", name, result)
		}
		if got := addressesIn(t, n.Options.Namespaces.Path(name)); !slices.Equal(got, result.Addresses) {
			t.Errorf("%s: eth0 has %v, the result says %v", name, got, result.Addresses)
		}
	}
	serve(t, n.Options.Namespaces.Path("web"), "0.0.0.0:80")
	for _, address := range []string{netip.AddrPortFrom(web.Addresses[0], 80).String(), "10.95.0.1:8095"} {
		wantAnswer(t, address)
	}

	for _, id := range []string{"web", "db"} {
		n.detach(t, id)
		n.detach(t, id) // the second time there is nothing to do
	}
	if left := addressFiles(t, n); len(left) > 0 {
		t.Errorf("addresses left: %q", left)
	}
	if left := without(rules(t), rulesBefore, "web", "db"); len(left) > 0 {
		t.Errorf("rules left: %q", left)
	}
	if left := without(links(t), append(linksBefore, "test-br1"), ""); len(left) > 0 {
		t.Errorf("links left: %q", left)
	}
	if n.find("web") != nil || len(n.Pending()) > 0 {
		t.Error("the journal is not empty")
	}
}

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
	if err != nil {
		t.Fatal(err)
	}
}

func TestAttachNeedsTheJournal(t *testing.T) {
	n := newNode(t, nil)
	_, err := n.Attach(t.Context(), "web", "/nowhere")
	wantError(t, err, "web", "not in the journal")
}

// The error of a plugin says who failed, at what, with which code.
func TestAttachThatFails(t *testing.T) {
	n := newNode(t, nil)
	n.configure(t, "10.conflist", "net", n.script())
	n.journalled(t, "web", nil)
	n.tell(t, "ADD.fail")
	_, err := n.Attach(t.Context(), "web", n.Options.Namespaces.Path("web"))
	wantError(t, err, "CNI ADD", "scripted", "told to fail", "CNI error code 11")
	if n.find("web") == nil {
		t.Error("the attachment has left the journal before DEL")
	}
	n.detach(t, "web")
	if calls := n.calls(t, "DEL"); len(calls) != 1 {
		t.Errorf("DEL after a failed ADD: %q", calls)
	}
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
	if err != nil {
		t.Fatal(err)
	}
	defer handle.Close()
	err = namespace.OnDisposableThread(func() error {
		if err := netns.Set(handle); err != nil {
			return err
		}
		return do()
	})
	if err != nil {
		t.Fatal(err)
	}
}

func addressesIn(t *testing.T, path string) (found []netip.Addr) {
	t.Helper()
	in(t, path, func() error {
		eth, err := netlink.LinkByName("eth0")
		if err != nil {
			return err
		}
		list, err := netlink.AddrList(eth, netlink.FAMILY_ALL)
		for _, address := range list {
			if ip, ok := netip.AddrFromSlice(address.IP); ok && !ip.Unmap().IsLinkLocalUnicast() {
				found = append(found, ip.Unmap())
			}
		}
		return err
	})
	return found
}

// serve answers every connection in the namespace at path.
func serve(t *testing.T, path, address string) {
	t.Helper()
	var listener net.Listener
	in(t, path, func() (err error) {
		listener, err = net.Listen("tcp", address)
		return err
	})
	t.Cleanup(func() { _ = listener.Close() })
	go func() {
		for {
			connection, err := listener.Accept()
			if err != nil {
				return
			}
			_, _ = connection.Write([]byte("hello"))
			_ = connection.Close()
		}
	}()
}

func wantAnswer(t *testing.T, address string) {
	t.Helper()
	connection, err := net.DialTimeout("tcp", address, within)
	if err != nil {
		t.Error(err)
		return
	}
	defer connection.Close()
	must(t, connection.SetDeadline(time.Now().Add(within)))
	if answer, err := io.ReadAll(connection); err != nil || string(answer) != "hello" {
		t.Errorf("%s answered %q, %v", address, answer, err)
	}
}

func rules(t *testing.T) (rules []string) {
	t.Helper()
	for _, program := range []string{"iptables-save", "ip6tables-save"} {
		out, err := exec.Command(program).Output()
		if err != nil {
			t.Fatal(err)
		}
		rules = append(rules, strings.Split(string(out), "\n")...)
	}
	return rules
}

func links(t *testing.T) (names []string) {
	t.Helper()
	list, err := netlink.LinkList()
	if err != nil {
		t.Fatal(err)
	}
	for _, link := range list {
		names = append(names, link.Attrs().Name)
	}
	return names
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

// addressFiles are the addresses that host-local holds for the default network.
func addressFiles(t *testing.T, n *node) []string {
	t.Helper()
	files, err := filepath.Glob(filepath.Join(n.Default.DataDir, n.Default.Name, "*[.:]*"))
	if err != nil {
		t.Fatal(err)
	}
	return slices.DeleteFunc(files, func(file string) bool { return strings.Contains(filepath.Base(file), "last_reserved") })
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
