package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

func idMap(container, host, length uint32) *runtimeapi.IDMapping {
	return &runtimeapi.IDMapping{ContainerId: container, HostId: host, Length: length}
}

func userNamespace(mappings ...*runtimeapi.IDMapping) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{
			Mode: runtimeapi.NamespaceMode_POD, Uids: mappings, Gids: mappings,
		}
	}
}

// cri: IDMapping.host_id NamespaceOption.userns_options UserNamespace.uids
func TestUserNamespaceIsMapped(t *testing.T) {
	n := newNode(t)
	for name, c := range map[string]struct {
		mappings []*runtimeapi.IDMapping
		want     string
	}{
		"one":     {[]*runtimeapi.IDMapping{idMap(0, 100000, 65536)}, "0 100000 65536"},
		"several": {[]*runtimeapi.IDMapping{idMap(0, 200000, 1000), idMap(1000, 300000, 1), idMap(2000, 400000, 500)}, "0 200000 1000 1000 300000 1 2000 400000 500"},
	} {
		id := n.RunPod(n.PodConfig(name, userNamespace(c.mappings...)))
		pid := pausePID(t, n, id)
		for _, file := range []string{"uid_map", "gid_map"} {
			if got := strings.Join(strings.Fields(procFile(t, pid, file)), " "); got != c.want {
				t.Errorf("%s: %s: want %s, got %s", name, file, c.want, got)
			}
		}
		root := fmt.Sprint(c.mappings[0].HostId)
		if uid := strings.Fields(statusField(t, pid, "Uid"))[0]; uid != root {
			t.Errorf("%s: pause runs as %s on the node, want %s", name, uid, root)
		}
		if namespace(t, pid, "user") == namespace(t, os.Getpid(), "user") {
			t.Errorf("%s: pause is in the node's user namespace", name)
		}
		if status := podStatus(t, n, id); status.Network.Ip == "" || len(status.Linux.Namespaces.Options.UsernsOptions.Uids) != len(c.mappings) {
			t.Errorf("%s: status is %v", name, status)
		}
	}
}

func TestProperty25_UserNamespaceOwnsTheNetworkNamespace(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web", userNamespace(idMap(0, 100000, 65536)), sysctls("net.ipv4.conf.eth0.arp_announce", "2", "net.core.somaxconn", "99")))
	info := verbose(t, n, id)
	for name, want := range map[string]string{"net.ipv4.conf.eth0.arp_announce": "2", "net.core.somaxconn": "99"} {
		if got := netSysctl(t, info.PID, name); got != want {
			t.Errorf("%s is %q", name, got)
		}
	}
	var shm unix.Stat_t
	check(t, unix.Stat(filepath.Join(n.State, "sandboxes", id, "shm"), &shm))
	if shm.Uid != 100000 || shm.Gid != 100000 || shm.Mode&0o7777 != 0o1777 {
		t.Errorf("the shared memory is of %d:%d with mode %o", shm.Uid, shm.Gid, shm.Mode)
	}
	network, err := os.Open(info.NetNamespace)
	check(t, err)
	defer network.Close()
	// ioctl_nsfs(2)
	owner, err := unix.IoctlRetInt(int(network.Fd()), unix.NS_GET_USERNS)
	check(t, err)
	defer unix.Close(owner)
	name, err := os.Readlink(fmt.Sprintf("/proc/self/fd/%d", owner))
	check(t, err)
	// The link of an ioctl's descriptor is the namespace's name.
	if want := namespace(t, info.PID, "user"); name != want {
		t.Errorf("the network namespace is owned by %s, pause is in %s", name, want)
	}
	if want := namespace(t, info.PID, "net"); netnsName(t, network) != want {
		t.Errorf("pinned is %s, pause is in %s", netnsName(t, network), want)
	}
}

func netnsName(t *testing.T, file *os.File) string {
	t.Helper()
	var stat unix.Stat_t
	check(t, unix.Fstat(int(file.Fd()), &stat))
	return fmt.Sprintf("net:[%d]", stat.Ino)
}

// cri: PodSandboxStatusResponse.status
func TestUserNamespaceSurvivesARestart(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web", userNamespace(idMap(0, 100000, 65536))))
	pid := pausePID(t, n, id)
	n.Kill()
	n.Start()
	if !ready(t, n, id) || pausePID(t, n, id) != pid {
		t.Errorf("got %v", podStatus(t, n, id))
	}
	check(t, remove(t, n, id))
}
