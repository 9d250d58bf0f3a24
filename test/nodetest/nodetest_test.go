package nodetest

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/leak"
)

func prepared(t testing.TB, opts ...Option) *Node { return prepare(t, BinDir(t), opts) }

// What the real plugins make for one attachment is within the scope in which the node looks for leaks, with
// either backend, and what they keep after DEL is not.
func TestNetworkIsInScope(t *testing.T) {
	n := prepared(t, DualStack(), NoNetwork())
	pod := exec.Command("unshare", "--net", "sleep", "600")
	harness.Check(t, n.inNetns(pod.Start))
	harness.Eventually(t, "unshare becomes sleep", func() bool {
		comm := harness.Read(t, fmt.Sprintf("/proc/%d/comm", pod.Process.Pid))
		return string(comm) == "sleep\n"
	})
	defer func() {
		harness.Check(t, pod.Process.Kill())
		_ = pod.Wait() // its error is the kill
	}()
	attachment := &libcni.RuntimeConf{
		ContainerID: "c0ffee", IfName: "eth0", NetNS: fmt.Sprintf("/proc/%d/ns/net", pod.Process.Pid),
		CapabilityArgs: map[string]any{"portMappings": []Object{{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}}},
	}
	cni := libcni.NewCNIConfig([]string{n.CNIBin}, nil)
	for _, backend := range []string{"iptables", "nftables"} {
		bridge := n.BridgePlugin()
		bridge["ipMasqBackend"] = backend
		network, err := libcni.ConfListFromFile(n.WriteConflist("10-test.conflist", bridge,
			Object{"type": "portmap", "backend": backend, "capabilities": Object{"portMappings": true}}, Object{"type": "firewall", "backend": "iptables"}))
		harness.Check(t, err)
		add := func() error { _, err := cni.AddNetworkList(context.Background(), network, attachment); return err }
		del := func() error { return cni.DelNetworkList(context.Background(), network, attachment) }
		n.RunInNetns(add)
		n.RunInNetns(del)
		clean := n.look(n.machineScope())
		kept := leak.Tally(leak.Diff(leak.Snapshot{}, clean))[leak.Rule]
		harness.Want(t, kept == 0, "%s: the plugins' own chains count as %d leaks", backend, kept)
		n.RunInNetns(add)
		more := leak.Diff(clean, n.look(n.machineScope()))
		tally := leak.Tally(more)
		harness.Want(t, tally[leak.Address] == 2,
			"%s: want two addresses, a link, a result, rules of masquerade and portmap of both families, got %v", backend, more)
		harness.Want(t, tally[leak.Link] == 1,
			"%s: want two addresses, a link, a result, rules of masquerade and portmap of both families, got %v", backend, more)
		harness.Want(t, tally[leak.Result] == 1,
			"%s: want two addresses, a link, a result, rules of masquerade and portmap of both families, got %v", backend, more)
		harness.Want(t, tally[leak.Rule] >= 4,
			"%s: want two addresses, a link, a result, rules of masquerade and portmap of both families, got %v", backend, more)
		n.RunInNetns(del)
		n.expectSame("after DEL", clean, n.machineScope(), settleTime)
	}
}

func TestLeaksAndLossesAreReportedAndTakenAway(t *testing.T) {
	r := &recorder{TB: t}
	n := prepared(r)
	cgroup := filepath.Join(n.hierarchies()[0], n.CgroupParent, "left")
	empty := n.look(n.machineScope())
	harness.Check(t, unix.Mount("harness-test", n.Logs, "tmpfs", 0, ""))
	harness.Check(t, os.Mkdir(cgroup, 0o755))
	n.RunInNetns(func() error { return netlink.LinkDel(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: n.Bridge}}) })
	n.expectSame("test", empty, n.machineScope(), 5*time.Second) // all of it stays
	report := strings.Join(r.errors, "\n")
	for _, want := range []string{"left behind: mount " + n.Logs, "left behind: cgroup " + n.CgroupParent + "/left", "lost: link " + n.Bridge} {
		harness.Want(t, strings.Contains(report, want), "not reported: %s", want)
	}
	harness.Want(t, len(r.errors) == 3, "want 3 errors, got:\n%s", report)
	r.errors = nil
	n.removeAll()
	harness.Want(t, len(r.errors) == 0, "removing all: %v", r.errors)
	wantAbsent(t, n.Dir)
	wantAbsent(t, cgroup)
}

func wantAbsent(t *testing.T, path string) {
	t.Helper()
	_, err := os.Stat(path)
	harness.Want(t, errors.Is(err, os.ErrNotExist), "%s stays: %v", path, err)
}

// recorder is a test whose errors are wanted.
type recorder struct {
	testing.TB
	errors []string
}

func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}
