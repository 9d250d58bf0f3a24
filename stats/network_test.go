package stats

import (
	"bufio"
	"fmt"
	"net"
	"os"
	"os/exec"
	"strconv"
	"strings"
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

// device are the counters of /proc/PID/net/dev.
type device struct{ rxBytes, rxErrors, txBytes, txErrors uint64 }

func devices(t *testing.T, pid int) map[string]device {
	t.Helper()
	file, err := os.Open(fmt.Sprintf("/proc/%d/net/dev", pid))
	must(t, err)
	defer func() { _ = file.Close() }()
	found := make(map[string]device)
	for lines := bufio.NewScanner(file); lines.Scan(); {
		name, counters, isDevice := strings.Cut(lines.Text(), ":")
		if !isDevice {
			continue
		}
		fields := strings.Fields(counters)
		number := func(column int) uint64 {
			n, err := strconv.ParseUint(fields[column], 10, 64)
			must(t, err)
			return n
		}
		found[strings.TrimSpace(name)] = device{number(0), number(2), number(8), number(10)}
	}
	return found
}

// cri: NetworkInterfaceUsage.name NetworkInterfaceUsage.rx_bytes NetworkInterfaceUsage.rx_errors
// cri: NetworkInterfaceUsage.tx_bytes NetworkInterfaceUsage.tx_errors NetworkUsage.default_interface
// cri: NetworkUsage.interfaces NetworkUsage.timestamp
func TestNetwork(t *testing.T) {
	pid := newNamespace(t)
	path := fmt.Sprintf("/proc/%d/ns/net", pid)
	if empty, err := readNetwork(path); err != nil || empty != nil {
		t.Errorf("a namespace with nothing but loopback has %v (%v)", empty, err)
	}
	addPair(t, path)
	before := devices(t, pid)
	// 10 datagrams of 1000 bytes, with the headers of UDP, IP and Ethernet.
	const sent = 10 * (1000 + 8 + 20 + 14)
	send := exec.Command("nsenter", "--net="+path, "bash", "-c",
		`text=$(printf %1000s); for i in 1 2 3 4 5 6 7 8 9 10; do printf %s "$text" > /dev/udp/10.1.1.2/9; done`)
	if out, err := send.CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, out)
	}
	low := devices(t, pid)
	got, err := readNetwork(path)
	must(t, err)
	high := devices(t, pid)
	if got.GetTimestamp() <= 0 || got.GetDefaultInterface().GetName() != "eth0" || len(got.GetInterfaces()) != 1 || got.GetInterfaces()[0].GetName() != "net1" {
		t.Fatalf("the interfaces are %v", got)
	}
	for _, usage := range append(got.GetInterfaces(), got.GetDefaultInterface()) {
		l, h := low[usage.GetName()], high[usage.GetName()]
		between(t, usage.GetName()+" rx bytes", l.rxBytes, usage.GetRxBytes().GetValue(), h.rxBytes)
		between(t, usage.GetName()+" rx errors", l.rxErrors, usage.GetRxErrors().GetValue(), h.rxErrors)
		between(t, usage.GetName()+" tx bytes", l.txBytes, usage.GetTxBytes().GetValue(), h.txBytes)
		between(t, usage.GetName()+" tx errors", l.txErrors, usage.GetTxErrors().GetValue(), h.txErrors)
	}
	if grown := got.GetDefaultInterface().GetTxBytes().GetValue() - before["eth0"].txBytes; grown < sent {
		t.Errorf("eth0 has sent %d bytes, not the %d that were", grown, sent)
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
		cgroup := makeCgroup(t, m.hierarchies, "no-network")
		pod, err := m.Pod(t.Context(), Pod{ID: "pod", Cgroups: []string{cgroup}, Netns: path})
		if err != nil || pod.GetLinux().GetCpu() == nil || pod.GetLinux().GetNetwork() != nil {
			t.Errorf("a pod without its network is %v (%v)", pod, err)
		}
	}
}
