package harness

import (
	"context"
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

	"github.com/minicri/minicri/test/leak"
)

func prepared(t testing.TB, opts ...Option) *Node {
	t.Helper()
	if os.Getuid() != 0 {
		t.Fatal("needs root: it makes namespaces, mounts, links and cgroups")
	}
	return prepare(t, BinDir(t), opts)
}

func check(t testing.TB, err error) {
	t.Helper()
	Check(t, err)
}

// The CNI configuration works with the real plugins, and what they make is
// within the scope in which the node looks for leaks.
func TestNetworkIsInScope(t *testing.T) {
	n := prepared(t, DualStack(), PortMap())
	empty := n.look(n.machineScope())

	pod := exec.Command("unshare", "--net", "sleep", "600")
	check(t, n.inNetns(pod.Start))
	waitForCommand(t, pod.Process.Pid, "sleep")
	network, err := libcni.ConfListFromFile(filepath.Join(n.CNIConf, "10-test.conflist"))
	check(t, err)
	attachment := &libcni.RuntimeConf{
		ContainerID: "c0ffee", IfName: "eth0", NetNS: fmt.Sprintf("/proc/%d/ns/net", pod.Process.Pid),
		CapabilityArgs: map[string]any{
			"portMappings": []map[string]any{{"hostPort": 8080, "containerPort": 80, "protocol": "tcp"}},
		},
	}
	cni := libcni.NewCNIConfig([]string{n.CNIBin}, nil)
	n.RunInNetns(func() error {
		_, err := cni.AddNetworkList(context.Background(), network, attachment)
		return err
	})

	more := leak.Diff(empty, n.look(n.machineScope()))
	tally := leak.Tally(more)
	want := map[leak.Kind]int{leak.Address: 2, leak.Link: 1, leak.Result: 1, leak.Namespace: 1}
	for kind, count := range want {
		if tally[kind] != count {
			t.Errorf("want %d of kind %s, got %d: %v", count, kind, tally[kind], more)
		}
	}
	if tally[leak.Rule] < 4 {
		t.Errorf("want rules of masquerade and portmap for both families, got %d", tally[leak.Rule])
	}

	n.RunInNetns(func() error { return cni.DelNetworkList(context.Background(), network, attachment) })
	check(t, pod.Process.Kill())
	pod.Wait() // its error is the kill
	n.expectNothingMore(t.Context(), "after DEL", empty, n.machineScope())
}

func waitForCommand(t *testing.T, pid int, name string) {
	t.Helper()
	Eventually(t, fmt.Sprintf("process %d is %s", pid, name), settleTime, func() bool {
		comm, err := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
		check(t, err)
		return strings.TrimSpace(string(comm)) == name
	})
}

// recorder is a test whose errors are wanted.
type recorder struct {
	testing.TB
	errors []string
}

func (r *recorder) Errorf(format string, args ...any) {
	r.errors = append(r.errors, fmt.Sprintf(format, args...))
}

func TestLeaksAndLossesAreReportedAndTakenAway(t *testing.T) {
	r := &recorder{TB: t}
	n := prepared(r)
	cgroup := filepath.Join(n.hierarchies()[0], n.CgroupParent, "left")
	empty := n.look(n.machineScope())

	check(t, unix.Mount("harness-test", n.Logs, "tmpfs", 0, ""))
	check(t, os.Mkdir(cgroup, 0o755))
	check(t, n.inNetns(func() error {
		return netlink.LinkDel(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: n.Bridge}})
	}))
	ctx, cancel := context.WithTimeout(t.Context(), 5*time.Second) // all of it stays
	defer cancel()
	n.expectNothingMore(ctx, "test", empty, n.machineScope())
	report := strings.Join(r.errors, "\n")
	for _, want := range []string{
		"left behind: mount " + n.Logs, "left behind: cgroup " + n.CgroupParent + "/left", "lost: link " + n.Bridge,
	} {
		if !strings.Contains(report, want) {
			t.Errorf("not reported: %s", want)
		}
	}
	if len(r.errors) != 3 {
		t.Errorf("want 3 errors, got:\n%s", report)
	}

	r.errors = nil
	n.removeAll()
	if len(r.errors) != 0 {
		t.Errorf("removing all: %v", r.errors)
	}
	if _, err := os.Stat(n.Dir); !os.IsNotExist(err) {
		t.Errorf("the directory stays: %v", err)
	}
	if _, err := os.Stat(cgroup); !os.IsNotExist(err) {
		t.Errorf("the cgroup stays: %v", err)
	}
}
