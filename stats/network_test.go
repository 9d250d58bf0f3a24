package stats

import (
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"github.com/vishvananda/netns"
	"golang.org/x/sys/unix"
)

// newNamespace is a network namespace that a process of the test holds.
func newNamespace(t *testing.T) (pid int) {
	t.Helper()
	command := exec.Command("sh", "-c", "echo; read line")
	command.SysProcAttr = &unix.SysProcAttr{Cloneflags: unix.CLONE_NEWNET}
	stdin, err := command.StdinPipe()
	must(t, err)
	must(t, command.Start())
	t.Cleanup(func() {
		_ = stdin.Close()
		_ = command.Wait()
	})
	return command.Process.Pid
}

// addPair makes the two ends of a cable in the namespace, eth0 with 10.1.1.1
// and net1, whose address eth0 knows.
func addPair(t *testing.T, path string) {
	t.Helper()
	namespace, err := netns.GetFromPath(path)
	must(t, err)
	defer func() { _ = namespace.Close() }()
	handle, err := netlink.NewHandleAt(namespace, unix.NETLINK_ROUTE)
	must(t, err)
	defer handle.Close()
	must(t, handle.LinkAdd(&netlink.Veth{LinkAttrs: netlink.LinkAttrs{Name: "eth0"}, PeerName: "net1"}))
	eth0, err := handle.LinkByName("eth0")
	must(t, err)
	net1, err := handle.LinkByName("net1")
	must(t, err)
	must(t, handle.AddrAdd(eth0, &netlink.Addr{IPNet: &net.IPNet{IP: net.IPv4(10, 1, 1, 1), Mask: net.CIDRMask(24, 32)}}))
	must(t, handle.LinkSetUp(eth0))
	must(t, handle.LinkSetUp(net1))
	must(t, handle.NeighSet(&netlink.Neigh{
		LinkIndex: eth0.Attrs().Index, State: unix.NUD_PERMANENT, IP: net.IPv4(10, 1, 1, 2), HardwareAddr: net1.Attrs().HardwareAddr,
	}))
	// Until the kernel has seen that both ends are up, it drops what is sent.
	deadline := time.Now().Add(10 * time.Second)
	for eth0.Attrs().OperState != netlink.OperUp {
		if time.Now().After(deadline) {
			t.Fatalf("eth0 is %v", eth0.Attrs().OperState)
		}
		time.Sleep(time.Millisecond)
		eth0, err = handle.LinkByName("eth0")
		must(t, err)
	}
}

// cri: LinuxPodSandboxStats.network
func TestNetworkThatIsGone(t *testing.T) {
	plain := t.TempDir() + "/plain"
	must(t, os.WriteFile(plain, nil, 0o600))
	for _, path := range []string{plain, plain + "-missing"} {
		if got, err := readNetwork(path); err == nil {
			t.Errorf("%s is no namespace and has %v", path, got)
		}
		m := newMeter(t, directories(t.TempDir()))
		cgroup := makeCgroup(t, m.hierarchies, filepath.Base(path))
		pod, err := m.Pod(t.Context(), Pod{ID: "pod", Cgroups: []string{cgroup}, Netns: path})
		if err != nil || pod.GetLinux().GetCpu() == nil || pod.GetLinux().GetNetwork() != nil {
			t.Errorf("a pod without its network is %v (%v)", pod, err)
		}
	}
}
