package container

import (
	"os"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

func pidMode(mode runtimeapi.NamespaceMode, target string) option {
	return func(c *runtimeapi.ContainerConfig) {
		c.Linux.SecurityContext.NamespaceOptions = &runtimeapi.NamespaceOption{Pid: mode, TargetId: target}
	}
}

func podPID(mode runtimeapi.NamespaceMode) func(*runtimeapi.PodSandboxConfig) {
	return func(c *runtimeapi.PodSandboxConfig) { c.Linux.SecurityContext.NamespaceOptions.Pid = mode }
}

// wantNamespaces fails the test unless two processes share the namespaces, or
// do not.
func wantNamespaces(t *testing.T, one, other int, shared bool, kinds ...string) {
	t.Helper()
	for _, kind := range kinds {
		if (namespace(t, one, kind) == namespace(t, other, kind)) != shared {
			t.Errorf("processes %d and %d: want %s namespace shared: %v", one, other, kind, shared)
		}
	}
}

// cri: ExecSyncRequest.timeout NamespaceOption.target_id
func TestPIDModes(t *testing.T) {
	n := newNode(t)
	apart, together, node := runPod(t, n, "apart"), runPod(t, n, "together", podPID(runtimeapi.NamespaceMode_POD)), runPod(t, n, "node", podPID(runtimeapi.NamespaceMode_NODE))
	first := apart.run("first", forever)
	same(t, "CONTAINER: process 1", apart.exec(first, "readlink /proc/1/exe"), "/bin/busybox")
	target := apart.run("target", forever, pidMode(runtimeapi.NamespaceMode_TARGET, first))
	wantNamespaces(t, apart.info(first).PID, apart.info(target).PID, true, "pid", "net")
	_, err := apart.tryCreate(shell("lost", "true", pidMode(runtimeapi.NamespaceMode_TARGET, "nosuch")))
	wantCode(t, err, codes.NotFound)
	pod := together.run("pod", forever, pidMode(runtimeapi.NamespaceMode_POD, ""))
	second := together.run("second", forever, pidMode(runtimeapi.NamespaceMode_POD, ""))
	wantNamespaces(t, together.info(pod).PID, together.info(second).PID, true, "pid")
	same(t, "POD: process 1", together.exec(pod, "cat /proc/1/comm"), "pause")
	host := node.run("host", forever, pidMode(runtimeapi.NamespaceMode_NODE, ""))
	wantNamespaces(t, node.info(host).PID, os.Getpid(), true, "pid")
}

func TestP35_ExecJoinsTheContainer(t *testing.T) {
	p := newPod(t)
	id := p.run("one", forever)
	one, other := p.info(id).PID, p.info(p.run("other", forever)).PID
	wantNamespaces(t, one, other, true, "net", "ipc", "uts")
	wantNamespaces(t, one, other, false, "pid", "mnt")
	wantNamespaces(t, one, os.Getpid(), false, "net", "ipc", "uts", "pid", "mnt")
	for _, kind := range []string{"net", "ipc", "uts", "pid", "mnt", "user", "cgroup"} {
		same(t, kind, p.exec(id, "readlink /proc/self/ns/"+kind), namespace(t, one, kind))
	}
}
