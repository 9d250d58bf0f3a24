package harness

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/leak"
)

func prepared(t testing.TB, opts ...Option) *Node { return prepare(t, BinDir(t), opts) }

// What the real plugins make for one attachment is within the scope in which the node looks for leaks, with
// either backend, and what they keep after DEL is not.
func TestNetworkIsInScope(t *testing.T) {
	n := prepared(t, DualStack(), NoNetwork())
	pod := exec.Command("unshare", "--net", "sleep", "600")
	Check(t, n.inNetns(pod.Start))
	Eventually(t, "unshare becomes sleep", func() bool {
		comm := Read(t, fmt.Sprintf("/proc/%d/comm", pod.Process.Pid))
		return string(comm) == "sleep\n"
	})
	defer func() {
		Check(t, pod.Process.Kill())
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
		Check(t, err)
		add := func() error { _, err := cni.AddNetworkList(context.Background(), network, attachment); return err }
		del := func() error { return cni.DelNetworkList(context.Background(), network, attachment) }
		n.RunInNetns(add)
		n.RunInNetns(del)
		clean := n.look(n.machineScope())
		kept := leak.Tally(leak.Diff(leak.Snapshot{}, clean))[leak.Rule]
		Want(t, kept == 0, "%s: the plugins' own chains count as %d leaks", backend, kept)
		n.RunInNetns(add)
		more := leak.Diff(clean, n.look(n.machineScope()))
		tally := leak.Tally(more)
		Want(t, tally[leak.Address] == 2 && tally[leak.Link] == 1 && tally[leak.Result] == 1 && tally[leak.Rule] >= 4,
			"%s: want two addresses, a link, a result, rules of masquerade and portmap of both families, got %v", backend, more)
		n.RunInNetns(del)
		n.expectSame("after DEL", clean, n.machineScope(), settleTime)
	}
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
	Check(t, unix.Mount("harness-test", n.Logs, "tmpfs", 0, ""))
	Check(t, os.Mkdir(cgroup, 0o755))
	n.RunInNetns(func() error { return netlink.LinkDel(&netlink.Bridge{LinkAttrs: netlink.LinkAttrs{Name: n.Bridge}}) })
	n.expectSame("test", empty, n.machineScope(), 5*time.Second) // all of it stays
	report := strings.Join(r.errors, "\n")
	for _, want := range []string{"left behind: mount " + n.Logs, "left behind: cgroup " + n.CgroupParent + "/left", "lost: link " + n.Bridge} {
		Want(t, strings.Contains(report, want), "not reported: %s", want)
	}
	Want(t, len(r.errors) == 3, "want 3 errors, got:\n%s", report)
	r.errors = nil
	n.removeAll()
	Want(t, len(r.errors) == 0, "removing all: %v", r.errors)
	wantAbsent(t, n.Dir)
	wantAbsent(t, cgroup)
}

func wantAbsent(t *testing.T, path string) {
	t.Helper()
	_, err := os.Stat(path)
	Want(t, errors.Is(err, os.ErrNotExist), "%s stays: %v", path, err)
}

// The cgroup of a node that has no owner is removed. That of one that has an owner stays, also when the one
// that sweeps sees nothing else of the node: it is in a mount namespace with another /tmp.
func TestSweepCgroups(t *testing.T) {
	n := prepared(t)
	all := n.hierarchies()
	for _, hierarchy := range all {
		Check(t, os.MkdirAll(filepath.Join(hierarchy, cgroupPrefix+"mcr-gone", "below"), 0o755))
	}
	ended := filepath.Join(all[0], cgroupPrefix+"mcr-ended")
	lock, err := makeOwned(ended)
	Check(t, err)
	Check(t, lock.Close()) // as the kernel does for a process that was killed
	old, young := filepath.Join(all[0], "minicri-unit-sweep-old"), filepath.Join(all[0], "minicri-unit-sweep-young")
	Check(t, errors.Join(os.MkdirAll(filepath.Join(old, "below"), 0o755), os.Mkdir(young, 0o755)))
	yesterday := time.Now().AddDate(0, 0, -1)
	Check(t, os.Chtimes(old, yesterday, yesterday))
	Check(t, process.OnDisposableThread(func() error {
		err := errors.Join(unix.Unshare(unix.CLONE_FS|unix.CLONE_NEWNS), unix.Mount("", "/", "", unix.MS_REC|unix.MS_PRIVATE, ""),
			unix.Mount("tmpfs", os.TempDir(), "tmpfs", 0, ""))
		if _, sees := os.Stat(n.Dir); err != nil || !errors.Is(sees, os.ErrNotExist) {
			return fmt.Errorf("the node's directory is in sight: %v, %w", sees, err)
		}
		return SweepCgroups()
	}))
	wantAbsent(t, old)
	wantAbsent(t, ended)
	Check(t, os.Remove(young))
	for _, hierarchy := range all {
		wantAbsent(t, filepath.Join(hierarchy, cgroupPrefix+"mcr-gone"))
		_, err := os.Stat(filepath.Join(hierarchy, n.CgroupParent))
		Want(t, err == nil, "the cgroup of a node that has an owner: %v", err)
	}
}

// What prints alike is not the same.
func TestSame(t *testing.T) {
	for _, pair := range [][2]any{{[]string{""}, []string(nil)}, {[]string{"a b"}, []string{"a", "b"}}, {1, "1"}, {error(nil), "<nil>"}} {
		Want(t, !same(pair[0], pair[1]), "%#v and %#v are the same", pair[0], pair[1])
	}
	Want(t, same([]int{}, []int(nil)), "a list of nothing is not none")
}

// What fails in a function of a test is told with the lines that led there.
func TestFailureNamesItsCallers(t *testing.T) {
	r := &recorder{TB: t}
	Want(r, false, "direct")
	func() { Want(r, false, "below") }()
	WantError(r, nil)
	Want(t, len(r.errors) == 3 && r.errors[0] == "direct" && !strings.Contains(r.errors[2], "(by") &&
		regexp.MustCompile(`^below \(by harness_test\.go:\d+, harness_test\.go:\d+\)$`).MatchString(r.errors[1]), "failures are %q", r.errors)
}
