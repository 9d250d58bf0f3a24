package hostile

import (
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// attack: containers: root in a container writes noise over /etc/hostname, hosts and resolv.conf of its pod until they are full
// held: other containers of the pod start, and their HOSTNAME is the pod's
// field: in containerd and CRI-O, too, HOSTNAME does not come from the file
func TestSpoiltPodFilesKeepNoContainerFromStarting(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox()
	pod := n.PodConfig("spoilt")
	sandbox := n.RunPod(pod)
	spoiler := started(t, n, sandbox, pod, "spoiler", "sleep", "1000000")
	for _, file := range []string{"/etc/hostname", "/etc/hosts", "/etc/resolv.conf"} {
		written(t, n, spoiler, file)
	}
	next := started(t, n, sandbox, pod, "next", "sleep", "1000000")
	if _, output := run(t, n, next, "/bin/sh", "-c", "echo $HOSTNAME"); output != pod.Hostname+"\n" {
		t.Errorf("HOSTNAME is %q, want %q", output, pod.Hostname)
	}
}

// attack: containers: an exec with an argument, or with arguments together, that execve does not take
// held: refused by the size, before anything is started
// field: containerd and CRI-O start the runtime's init, and say what that says
func TestExecBeyondWhatExecveTakes(t *testing.T) {
	n := harness.NewNode(t)
	n.ImportBusybox()
	pod := n.PodConfig("large")
	id := started(t, n, n.RunPod(pod), pod, "c", "sleep", "1000000")
	for name, command := range map[string][]string{
		"one argument": {"true", strings.Repeat("x", 32*4096)}, "many arguments": append([]string{"true"}, make([]string, 1<<20)...),
	} {
		_, err := n.Runtime.ExecSync(limited(t), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: command})
		if status.Code(err) != codes.InvalidArgument || !strings.Contains(err.Error(), "execve(2) takes") || len(err.Error()) > 1024 {
			t.Errorf("%s: %.1000v", name, err)
		}
	}
	if code, output := run(t, n, id, "true", strings.Repeat("x", 32*4096-1)); code != 0 {
		t.Errorf("the largest argument: %d: %s", code, output)
	}
}

// started makes and starts a container.
func started(t testing.TB, n *harness.Node, sandbox string, pod *runtimeapi.PodSandboxConfig, name string, command ...string) (id string) {
	t.Helper()
	ctx := limited(t)
	made, err := n.Runtime.CreateContainer(ctx, &runtimeapi.CreateContainerRequest{PodSandboxId: sandbox, SandboxConfig: pod, Config: &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name}, Image: &runtimeapi.ImageSpec{Image: harness.BusyboxImage}, Command: command,
	}})
	check(t, err)
	_, err = n.Runtime.StartContainer(ctx, &runtimeapi.StartContainerRequest{ContainerId: made.GetContainerId()})
	check(t, err)
	return made.GetContainerId()
}
