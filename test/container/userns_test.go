package container

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// ids makes mappings of container id, host id and length, three by three.
func ids(numbers ...uint32) (mappings []*runtimeapi.IDMapping) {
	for of := range slices.Chunk(numbers, 3) {
		mappings = append(mappings, &runtimeapi.IDMapping{ContainerId: of[0], HostId: of[1], Length: of[2]})
	}
	return mappings
}

func usersOf(mappings []*runtimeapi.IDMapping) *runtimeapi.UserNamespace {
	return &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: mappings, Gids: mappings}
}

// users gives a pod a user namespace.
func users(mappings []*runtimeapi.IDMapping) harness.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = usersOf(mappings)
	}
}

// All mappings of a pod hold for the root of its containers, for volumes and for
// images that are mounted.
//
// cri: IDMapping.container_id IDMapping.length LinuxContainerSecurityContext.namespace_options
// cri: Mount.gidMappings Mount.uidMappings UserNamespace.gids UserNamespace.mode
func TestSeveralMappings(t *testing.T) {
	n := newNode(t)
	importData(n)
	mappings := ids(0, 300000, 1000, 1000, 500000, 1000, 60000, 700000, 10)
	p := runPod(t, n, "web", users(mappings))
	volume := filepath.Join(p.Dir, "volume")
	check(t, os.Mkdir(volume, 0o777))
	check(t, os.Chmod(volume, 0o777))
	check(t, os.WriteFile(filepath.Join(volume, "file"), nil, 0o644))
	check(t, os.Chown(filepath.Join(volume, "file"), 1000, 60001))
	mapped := func(m *runtimeapi.Mount) { m.UidMappings, m.GidMappings = mappings, mappings }
	id := p.run("app", forever, imageMount("/data", mapped), mounted(volume, "/v", mapped), func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = usersOf(mappings)
	})
	wantNamespaces(t, p.info(id).PID, os.Getpid(), false, "user")
	same(t, "who it is", p.exec(id, "id -u; echo x > /bin/new; stat -c %u /bin/new"), "0\n0")
	owners := func(paths string) string {
		return strings.Join(strings.Fields(p.exec(id, "stat -c %u:%g "+paths)), " ")
	}
	same(t, "root", owners("/bin/busybox /home"), "0:0 1000:1000")
	same(t, "the pod's files", owners("/etc/resolv.conf /etc/hosts /etc/hostname"), "0:0 0:0 0:0")
	same(t, "volume", owners("/v/file"), "1000:60001")
	same(t, "image", owners("/data/readme /data/models"), "0:0 1000:1000")
	p.exec(id, "touch /v/new && chown 60005:1500 /v/new")
	info, err := os.Stat(filepath.Join(volume, "new"))
	check(t, err)
	stat := info.Sys().(*syscall.Stat_t)
	same(t, "owner of the new file on the node", fmt.Sprint(stat.Uid, ":", stat.Gid), "60005:1500")
	same(t, "uid of root on the node", strings.Fields(harness.ProcStatus(t, p.info(id).PID, "Uid"))[0], "300000")
	same(t, "who can be", p.exec(id, "cat /proc/self/uid_map | awk '{print $1\" \"$2\" \"$3}'"), "0 300000 1000\n1000 500000 1000\n60000 700000 10")
}

// Volumes that an image declares but does not have belong to the user of the
// container, with a user namespace and without.
func TestVolumesThatTheImageLacks(t *testing.T) {
	n := newNode(t)
	const image = "test.example/database:1"
	n.BuildImage(image, harness.Object{
		"Cmd": []string{"/bin/sh"}, "Env": []string{"PATH=/bin"}, "Volumes": harness.Object{"/var/lib/absent": harness.Object{}},
	}, n.AddBusybox)
	as := func(uid int64) option {
		return all(asUser(uid), attempt(uint32(uid)), func(c *runtimeapi.ContainerConfig) {
			c.Image.Image, c.Linux.SecurityContext.RunAsGroup = image, &runtimeapi.Int64Value{Value: uid + 1}
		})
	}
	for name, p := range map[string]*pod{"plain": runPod(t, n, "plain"), "userns": runPod(t, n, "userns", users(ids(0, 300000, 65536)))} {
		for _, uid := range []int64{0, 1000} {
			owner := p.exec(p.run("app", forever, as(uid)), "echo x > /var/lib/absent/file && stat -c %u:%g /var/lib/absent")
			same(t, name, owner, fmt.Sprint(uid, ":", uid+1))
		}
	}
}

// A pod can have users of its own and the network of the node: /sys is then the
// node's, read-only.
//
// cri: RuntimeFeatures.user_namespaces_host_network
func TestUserNamespaceInTheNetworkOfTheNode(t *testing.T) {
	n := newNode(t)
	features, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{})
	check(t, err)
	if !features.Features.UserNamespacesHostNetwork {
		t.Error("the feature is not reported")
	}
	p := runPod(t, n, "web", harness.HostNetwork(), users(ids(0, 300000, 65536)))
	id := p.run("app", forever)
	pid := p.info(id).PID
	wantNamespaces(t, pid, p.PID(), true, "net", "uts")
	wantNamespaces(t, pid, p.PID(), false, "user", "mnt", "ipc", "pid")
	same(t, "uid on the node", strings.Fields(harness.ProcStatus(t, pid, "Uid"))[0], "300000")
	p.exec(id, "test -e /sys/kernel && test -e /sys/class/net/lo && ! touch /sys/fs/cgroup/x 2>/dev/null")
	wantOptions(t, "/sys", p.mountOptions(id, "/sys"), "ro", "nosuid", "nodev", "noexec")
	// Of several mounts in one place the last is on top.
	writable := p.exec(id, `awk '$5 ~ "^/sys" {top[$5] = $6} END {for (place in top) if (top[place] !~ "^ro") print place}' /proc/self/mountinfo`)
	same(t, "what of /sys can be written to", writable, "")
	check(t, p.remove(id))
}
