package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
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
	id := n.RunPod(n.PodConfig("web", userNamespace(idMap(0, 100000, 65536))))
	info := verbose(t, n, id)
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

func TestSharedMemoryBelongsToRootOfTheUserNamespace(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web", userNamespace(idMap(0, 100000, 65536))))
	var stat unix.Stat_t
	check(t, unix.Stat(filepath.Join(n.State, "sandboxes", id, "shm"), &stat))
	if stat.Uid != 100000 || stat.Gid != 100000 || stat.Mode&0o7777 != 0o1777 {
		t.Errorf("it is of %d:%d with mode %o", stat.Uid, stat.Gid, stat.Mode)
	}
}

func TestUserNamespaceWithSysctlsOfAnInterface(t *testing.T) {
	n := newNode(t)
	config := n.PodConfig("web", userNamespace(idMap(0, 100000, 65536)), sysctls("net.ipv4.conf.eth0.arp_announce", "2", "net.core.somaxconn", "99"))
	pid := pausePID(t, n, n.RunPod(config))
	if got := netSysctl(t, pid, "net.ipv4.conf.eth0.arp_announce"); got != "2" {
		t.Errorf("arp_announce is %q", got)
	}
	if got := netSysctl(t, pid, "net.core.somaxconn"); got != "99" {
		t.Errorf("somaxconn is %q", got)
	}
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

func TestMappingsThatAreRefused(t *testing.T) {
	n := newNode(t)
	for name, mappings := range map[string][]*runtimeapi.IDMapping{
		"none":                   nil,
		"empty":                  {idMap(0, 1, 0)},
		"overlap on the node":    {idMap(0, 1000, 10), idMap(10, 1005, 10)},
		"overlap in the pod":     {idMap(0, 1000, 10), idMap(5, 2000, 10)},
		"without root":           {idMap(1, 1000, 10)},
		"beyond the highest uid": {idMap(0, 4294967290, 100)},
		"more than a map can have": func() (many []*runtimeapi.IDMapping) {
			for i := range uint32(341) {
				many = append(many, idMap(2*i, 100000+2*i, 1))
			}
			return many
		}(),
	} {
		config := n.PodConfig("web", userNamespace(mappings...))
		_, err := run(t, n, config)
		wantCode(t, err, codes.InvalidArgument)
		if err == nil || !strings.Contains(err.Error(), "userns_options") {
			t.Errorf("%s: the error does not name the field: %v", name, err)
		}
	}
	_, err := run(t, n, n.PodConfig("host", userNamespace(idMap(0, 1000, 10)), func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_NODE
	}))
	wantCode(t, err, codes.InvalidArgument)
}
