package harness

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"
	"time"

	"github.com/containernetworking/cni/libcni"
	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

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

func TestNetnsIsTheNodesOwn(t *testing.T) {
	n := prepared(t)
	n.RunInNetns(func() error {
		_, err := netlink.LinkByName(n.Bridge)
		return err
	})
	if _, err := netlink.LinkByName(n.Bridge); err == nil {
		t.Error("the bridge of the node is in the namespace of the test")
	}
	out, err := exec.Command("nsenter", fmt.Sprintf("--net=/proc/%d/fd/%d", os.Getpid(), n.netns.Fd()), "ip", "-brief", "link").Output()
	if err != nil || !strings.Contains(string(out), n.Bridge) {
		t.Errorf("nsenter sees %q, error %v", out, err)
	}
}

// A thread that stayed in a namespace would hold it, and run other tests in it.
func TestNoThreadStaysInNetns(t *testing.T) {
	var name string
	t.Run("node", func(t *testing.T) {
		n := prepared(t)
		var all sync.WaitGroup
		for range 50 {
			all.Go(func() {
				if err := n.inNetns(func() error { return nil }); err != nil {
					t.Error(err)
				}
			})
		}
		all.Wait()
		n.RunInNetns(func() (err error) {
			name, err = os.Readlink("/proc/thread-self/ns/net")
			return err
		})
	})
	Eventually(t, "nothing holds the namespace of a node that has ended", settleTime, func() bool {
		held, err := leak.Take(t.Context(), leak.Scope{Namespaces: []string{"net"}})
		check(t, err)
		return !slices.ContainsFunc(leak.Diff(leak.Snapshot{}, held), func(l leak.Leak) bool { return l.Name == name })
	})
}

func TestCgroupsAreRemovedWithTheirProcesses(t *testing.T) {
	n := prepared(t)
	sleep := exec.Command("sleep", "600")
	check(t, sleep.Start())
	hierarchies := n.hierarchies()
	if len(hierarchies) == 0 {
		t.Fatal("no cgroup hierarchy is mounted")
	}
	for _, hierarchy := range hierarchies {
		pod := filepath.Join(hierarchy, n.CgroupParent, "pod")
		check(t, os.Mkdir(pod, 0o755))
		check(t, fillCpuset(pod))
		check(t, os.WriteFile(filepath.Join(pod, "cgroup.procs"), fmt.Append(nil, sleep.Process.Pid), 0))
	}

	ended := make(chan error, 1)
	go func() { ended <- sleep.Wait() }()
	check(t, n.removeCgroups())
	select {
	case <-ended:
	case <-time.After(settleTime):
		t.Error("the process lives on")
	}
	for _, hierarchy := range hierarchies {
		if _, err := os.Stat(filepath.Join(hierarchy, n.CgroupParent)); !os.IsNotExist(err) {
			t.Errorf("the cgroup in %s stays: %v", hierarchy, err)
		}
	}
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

func TestRequirements(t *testing.T) {
	if err := checkRequirements(1000, BinDir(t)); err == nil || !strings.Contains(err.Error(), "root") {
		t.Errorf("without root: %v", err)
	}
	if err := checkRequirements(0, t.TempDir()); err == nil || !strings.Contains(err.Error(), "make setup build") {
		t.Errorf("without binaries: %v", err)
	}
}

func TestPodConfig(t *testing.T) {
	n := prepared(t)
	c := n.PodConfig("web", HostPort(8080, 80), Attempt(2))
	if c.Metadata.Attempt != 2 || c.PortMappings[0].HostPort != 8080 || c.Linux.CgroupParent != n.CgroupParent {
		t.Errorf("got %v", c)
	}
	if c.Metadata.Uid != n.PodConfig("web").Metadata.Uid || c.Metadata.Uid == n.PodConfig("db").Metadata.Uid {
		t.Error("the uid does not follow from the name")
	}
	host := n.PodConfig("host", HostNetwork())
	if host.Linux.SecurityContext.NamespaceOptions.Network != runtimeapi.NamespaceMode_NODE || host.Hostname != "" {
		t.Errorf("got %v", host)
	}
}

func TestFlagsOfDaemon(t *testing.T) {
	n := prepared(t, Flags("--extra"), Env("A=b"), Config("log_level = \"info\""))
	cmd := n.command()
	if cmd.Args[len(cmd.Args)-1] != "--extra" || cmd.Env[len(cmd.Env)-1] != "A=b" {
		t.Errorf("got %v %v", cmd.Args, cmd.Env)
	}
	config, err := os.ReadFile(n.configFile())
	check(t, err)
	if !strings.HasSuffix(string(config), "log_level = \"info\"\n") || !strings.Contains(string(config), n.CgroupParent) {
		t.Errorf("got %s", config)
	}
	// sockaddr_un, unix(7): 108 bytes with the NUL.
	if len(n.Socket) > 107 {
		t.Errorf("the socket's path is too long: %s", n.Socket)
	}
	if len(n.Bridge) >= unix.IFNAMSIZ {
		t.Errorf("the bridge's name is too long: %s", n.Bridge)
	}
}
