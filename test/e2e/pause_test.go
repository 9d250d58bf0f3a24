package e2e

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// pausePID is the id of a pod's pause process.
func pausePID(t testing.TB, n *nodetest.Node, id string) int {
	pid := verbose(t, n, id).PID
	exe, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	harness.Need(t, err == nil && filepath.Base(exe) == "pause", "process %d of pod %s is not pause but %q: %v", pid, id, exe, err)
	return pid
}

// procFile reads a file of /proc/PID.
func procFile(t testing.TB, pid int, name string) string {
	return strings.TrimSpace(string(harness.Read(t, fmt.Sprintf("/proc/%d/%s", pid, name))))
}

// namespace names a namespace of a process as the kernel does: "net:[4026531840]".
func namespace(t testing.TB, pid int, kind string) string {
	name, err := os.Readlink(fmt.Sprintf("/proc/%d/ns/%s", pid, kind))
	check(t, err)
	return name
}

// alive reports whether a process runs; a zombie does not.
func alive(pid int) bool {
	stat, err := process.ReadStat(pid)
	return err == nil && stat.State != 'Z'
}

// inside calls do on a thread in a namespace of a process, by its name in /proc/PID/ns.
func inside(t testing.TB, pid int, kind string, do func() error) {
	check(t, nodetest.Inside(fmt.Sprintf("/proc/%d/ns/%s", pid, kind), do))
}

// netSysctl reads a parameter in the network namespace of a process: /proc/sys/net shows that of the reading thread.
func netSysctl(t testing.TB, pid int, name string) (value string) {
	inside(t, pid, "net", func() error {
		data, err := os.ReadFile("/proc/sys/" + strings.ReplaceAll(name, ".", "/"))
		value = strings.TrimSpace(string(data))
		return err
	})
	return value
}

const modeContainer, modeNode = runtimeapi.NamespaceMode_CONTAINER, runtimeapi.NamespaceMode_NODE

// Each kind of namespace is the pod's own or the node's, as was asked for, and status tells the kubelet so.
//
// cri: LinuxPodSandboxStatus.namespaces Namespace.options PodSandboxStatus.linux
func TestNamespaceModes(t *testing.T) {
	n := newNode(t)
	node := os.Getpid()
	var nodeNet string
	n.RunInNetns(func() (err error) {
		nodeNet, err = os.Readlink("/proc/thread-self/ns/net")
		return err
	})
	own := make(map[string]bool) // namespaces of pods
	for name, mode := range harness.Sorted(map[string]*runtimeapi.NamespaceOption{
		"all-own":       {},
		"container-pid": {Pid: modeContainer},
		"node-network":  {Network: modeNode, Pid: modeContainer},
		"node-pid":      {Pid: modeNode},
		"node-ipc":      {Ipc: modeNode},
		"all-node":      {Network: modeNode, Pid: modeNode, Ipc: modeNode},
		"none-asked":    nil,
	}) {
		config := n.PodConfig(name)
		config.Linux.SecurityContext.NamespaceOptions = mode
		if mode == nil {
			config.Linux, mode = nil, &runtimeapi.NamespaceOption{}
		}
		if mode.Network == modeNode {
			config.Hostname = "" // it has that of the node
		}
		id := n.RunPod(config)
		pid := pausePID(t, n, id)
		for kind, want := range harness.Sorted(map[string]bool{"net": mode.Network == modeNode, "uts": mode.Network == modeNode, "pid": mode.Pid == modeNode, "ipc": mode.Ipc == modeNode, "mnt": false}) {
			of, nodes := namespace(t, pid, kind), namespace(t, node, kind)
			if kind == "net" {
				nodes = nodeNet
			}
			shared := of == nodes
			harness.Want(t, shared == want && !own[of], "%s: %s: shared with the node is %v, want %v; with another pod %v", name, kind, shared, want, own[of])
			own[of] = !want
		}
		status := podStatus(t, n, id)
		echoed := status.Linux.GetNamespaces().GetOptions()
		harness.Want(t, proto.Equal(echoed, mode) && (status.Network.GetIp() == "") == (mode.Network == modeNode), "%s: status is %v", name, status)
	}
}

// Pause is below the cgroup parent in every hierarchy, that of the node for pods that name none. The cgroup
// of the pod is the kubelet's: only what was made below it goes.
//
// cri: LinuxPodSandboxConfig.cgroup_parent PodSandboxConfig.linux
func TestPauseIsBelowTheCgroupParentInEveryHierarchy(t *testing.T) {
	n := newNode(t)
	v1, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup"))
	check(t, err)
	all, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	check(t, err)
	named := n.MakeCgroup("pod1")
	for name, parent := range harness.Sorted(map[string]string{"named": named, "none": ""}) {
		config := n.PodConfig(name)
		config.Linux.CgroupParent = parent
		if parent == "" {
			parent = n.CgroupParent
		}
		id := n.RunPod(config)
		info, found := verbose(t, n, id), 0
		for line := range strings.Lines(procFile(t, info.PID, "cgroup")) {
			// HIERARCHY:CONTROLLERS:PATH, cgroups(7)
			fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
			if len(v1) > 0 && fields[1] == "" {
				continue // hybrid: the version 2 hierarchy has no controllers
			}
			found++
			harness.Want(t, strings.HasPrefix(fields[2], parent+"/") && strings.HasPrefix(info.CgroupsPath, parent+"/"),
				"%s: in the hierarchy %q pause is in %s, status says %s", name, fields[1], fields[2], info.CgroupsPath)
		}
		harness.Same(t, name+": hierarchies that pause is in", found, max(len(v1), 1))
		check(t, remove(t, n, id))
		for _, m := range all {
			below := harness.Glob(t, m.Mountpoint, parent, "*", "cgroup.procs")
			// That of a plugin which is asked for STATUS comes and goes, and the other pod's stays.
			below = slices.DeleteFunc(below, func(path string) bool {
				return strings.Contains(path, "/minicri-cni-") || strings.HasSuffix(path, named+"/cgroup.procs")
			})
			_, err = os.Stat(filepath.Join(m.Mountpoint, parent))
			harness.Want(t, err == nil && len(below) == 0, "%s: in %s: %v, left %v", name, m.Mountpoint, err, below)
		}
	}
}

func sysctls(pairs ...string) nodetest.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.Sysctls = map[string]string{}
		for i := 0; i < len(pairs); i += 2 {
			c.Linux.Sysctls[pairs[i]] = pairs[i+1]
		}
	}
}

// Those of an interface exist only once ADD has made it.
func TestSysctls(t *testing.T) {
	n := newNode(t)
	pid := pausePID(t, n, n.RunPod(n.PodConfig("web", sysctls("net.core.somaxconn", "777", "net/ipv4/tcp_fin_timeout", "33",
		"net.ipv4.conf.eth0.arp_announce", "2", "net/ipv4/conf/eth0/arp_ignore", "1",
		"kernel.shm_rmid_forced", "1", "kernel.msgmax", "12345", "fs.mqueue.msg_max", "33"))))
	for name, want := range harness.Sorted(map[string]string{
		"net.core.somaxconn": "777", "net.ipv4.tcp_fin_timeout": "33", "net.ipv4.conf.eth0.arp_announce": "2", "net.ipv4.conf.eth0.arp_ignore": "1",
		// No one asked for these, every runtime sets them.
		"net.ipv4.ip_unprivileged_port_start": "0", "net.ipv4.ping_group_range": "0\t2147483647",
	}) {
		harness.Same(t, name, netSysctl(t, pid, name), want)
	}
	for path, want := range harness.Sorted(map[string]string{"kernel/shm_rmid_forced": "1\n", "kernel/msgmax": "12345\n", "fs/mqueue/msg_max": "33\n"}) {
		inside(t, pid, "ipc", func() error {
			got, err := os.ReadFile("/proc/sys/" + path)
			harness.Want(t, string(got) == want, "%s: want %q, got %q", path, want, got)
			return err
		})
	}
	own, _ := os.ReadFile("/proc/sys/net/core/somaxconn")
	harness.Want(t, string(own) != "777\n", "the node's somaxconn was set")
	_, err := run(t, n, n.PodConfig("refused", sysctls("net.ipv4.conf.eth0.arp_announce", "no number")))
	harness.Want(t, err != nil && len(list(t, n, nil)) == 1, "a value that the kernel refuses: %v", err)
}

// userNamespace maps ids by triples of container, host and length.
func userNamespace(ids ...uint32) nodetest.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) {
		mappings := nodetest.IDs(ids...)
		c.Linux.SecurityContext.NamespaceOptions.UsernsOptions = &runtimeapi.UserNamespace{Mode: runtimeapi.NamespaceMode_POD, Uids: mappings, Gids: mappings}
	}
}

// Users are mapped as asked for, the network namespace and the pod's files are of its root, and all of it is
// the same after a restart.
//
// cri: IDMapping.host_id NamespaceOption.userns_options UserNamespace.uids PodSandboxStatusResponse.status
func TestProperty25_UserNamespaceOwnsTheNetworkNamespace(t *testing.T) {
	n := newNode(t)
	pids := make(map[string]int)
	for range 2 {
		for name, ids := range harness.Sorted(map[string][]uint32{"one": {0, 100000, 65536}, "several": {0, 200000, 1000, 1000, 300000, 1, 2000, 400000, 500}}) {
			// The one that runs, after the restart.
			id := n.RunPod(n.PodConfig(name, userNamespace(ids...), sysctls("net.ipv4.conf.eth0.arp_announce", "2", "net.core.somaxconn", "99")))
			info := verbose(t, n, id)
			was := pids[name]
			harness.Want(t, was == 0 || was == info.PID, "%s: pause was %d, is %d", name, was, info.PID)
			harness.Want(t, ready(t, n, id), "%s: pause was %d, is %d", name, was, info.PID)
			pids[name] = info.PID
			for _, file := range []string{"uid_map", "gid_map"} {
				harness.Same(t, name+": "+file, strings.Fields(procFile(t, info.PID, file)), strings.Fields(strings.Trim(fmt.Sprint(ids), "[]")))
			}
			harness.Same(t, name+": pause's user", strings.Fields(harness.ProcStatus(t, info.PID, "Uid"))[0], fmt.Sprint(ids[1]))
			status := podStatus(t, n, id)
			harness.Want(t, status.Network.Ip != "" && len(status.Linux.Namespaces.Options.UsernsOptions.Uids) == len(ids)/3, "%s: status is %v", name, status)
			for key, want := range harness.Sorted(map[string]string{"net.ipv4.conf.eth0.arp_announce": "2", "net.core.somaxconn": "99"}) {
				harness.Same(t, name+": "+key, netSysctl(t, info.PID, key), want)
			}
			var shm unix.Stat_t
			check(t, unix.Stat(filepath.Join(n.State, "sandboxes", id, "shm"), &shm))
			harness.Want(t, shm.Uid == ids[1],
				"%s: the shared memory is of %d:%d with mode %o", name, shm.Uid, shm.Gid, shm.Mode)
			harness.Want(t, shm.Gid == ids[1],
				"%s: the shared memory is of %d:%d with mode %o", name, shm.Uid, shm.Gid, shm.Mode)
			harness.Want(t, shm.Mode&0o7777 == 0o1777,
				"%s: the shared memory is of %d:%d with mode %o", name, shm.Uid, shm.Gid, shm.Mode)
			wantOwner(t, info)
		}
		n.Crash()
	}
}

// wantOwner fails the test unless the network namespace that is pinned is pause's, and owned by pause's user
// namespace, which is not the node's.
func wantOwner(t *testing.T, info podInfo) {
	t.Helper()
	network, err := os.Open(info.NetNamespace)
	check(t, err)
	defer network.Close()
	owner, err := unix.IoctlRetInt(int(network.Fd()), unix.NS_GET_USERNS) // ioctl_nsfs(2)
	check(t, err)
	defer unix.Close(owner)
	for fd, kind := range map[int]string{int(network.Fd()): "net", owner: "user"} {
		var stat unix.Stat_t
		check(t, unix.Fstat(fd, &stat))
		name := fmt.Sprintf("%s:[%d]", kind, stat.Ino)
		if of := namespace(t, info.PID, kind); name != of || of == namespace(t, os.Getpid(), kind) {
			t.Errorf("pinned is %s, pause is in %s, the test in %s", name, of, namespace(t, os.Getpid(), kind))
		}
	}
}

func security(change func(*runtimeapi.LinuxSandboxSecurityContext)) nodetest.PodOption {
	return func(c *runtimeapi.PodSandboxConfig) { change(c.Linux.SecurityContext) }
}

// A process of the pod that has the same user, and sees pause in a pid namespace that they share, gets at
// nothing that pause has open.
func TestPauseGivesNoDescriptorAway(t *testing.T) {
	n := newNode(t)
	for _, user := range []int{0, 1234} {
		pid := pausePID(t, n, n.RunPod(n.PodConfig(fmt.Sprintf("user%d", user), security(func(s *runtimeapi.LinuxSandboxSecurityContext) {
			s.RunAsUser, s.RunAsGroup = &runtimeapi.Int64Value{Value: int64(user)}, &runtimeapi.Int64Value{Value: int64(user)}
		}))))
		check(t, takeDescriptor(pid)) // as root, which the supervisor is
		err := process.OnDisposableThread(func() error { return errors.Join(becomeUser(user), takeDescriptor(pid)) })
		harness.Want(t, errors.Is(err, unix.EPERM) && strings.Contains(fmt.Sprint(err), "pidfd_getfd"),
			"user %d gets a descriptor of pause: %v", user, err)
	}
}

// becomeUser makes this thread one of a user without capabilities.
func becomeUser(user int) error {
	for _, call := range []uintptr{unix.SYS_SETRESGID, unix.SYS_SETRESUID} { // of the thread, not of the process
		if _, _, errno := unix.RawSyscall(call, uintptr(user), uintptr(user), uintptr(user)); errno != 0 {
			return os.NewSyscallError("setresid", errno)
		}
	}
	header, none := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}, [2]unix.CapUserData{}
	return os.NewSyscallError("capset", unix.Capset(&header, &none[0]))
}

func takeDescriptor(pid int) error {
	pidfd, err := unix.PidfdOpen(pid, 0)
	if err != nil {
		return os.NewSyscallError("pidfd_open", err)
	}
	defer unix.Close(pidfd)
	fd, err := unix.PidfdGetfd(pidfd, 0, 0)
	if err != nil {
		return os.NewSyscallError("pidfd_getfd", err)
	}
	return unix.Close(fd)
}
