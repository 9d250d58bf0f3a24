package crash

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// attack: containers: the target of a container that joins its pid namespace ends while that one is made, and a process of the node gets its pid
// held: the container is not made: the target is held by a pidfd, not by its number
// field: containerd and CRI-O join whatever has the number then
func TestTargetWhosePidIsReused(t *testing.T) {
	n := newNode(t)
	n.ImportBusybox()
	pod := n.PodConfig("target")
	sandbox := n.RunPod(pod)
	create := func(name string, options *runtimeapi.NamespaceOption) (string, error) {
		c := harness.Container(name, "sleep", "1000000")
		c.Linux.SecurityContext.NamespaceOptions = options
		return n.CreateContainer(sandbox, pod, c)
	}
	target, err := create("target", &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_CONTAINER})
	check(t, err)
	_, err = n.Runtime.StartContainer(harness.Limited(t, patience), &runtimeapi.StartContainerRequest{ContainerId: target})
	check(t, err)
	answer, err := n.Runtime.ContainerStatus(harness.Limited(t, patience), &runtimeapi.ContainerStatusRequest{ContainerId: target, Verbose: true})
	check(t, err)
	var info struct{ PID int }
	check(t, json.Unmarshal([]byte(answer.GetInfo()["info"]), &info))

	n.arm(t, "container/create before hang")
	failed := make(chan error, 1)
	go func() {
		_, err := create("debugger", &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_TARGET, TargetId: target})
		failed <- err
	}()
	eventually(t, "the container is about to be made", n.wasHit)
	check(t, unix.Kill(info.PID, unix.SIGKILL))
	eventually(t, "the target has ended", func() bool { return errors.Is(unix.Kill(info.PID, 0), unix.ESRCH) })
	takePid(t, info.PID)
	n.disarm(t)
	if err := <-failed; err == nil || !strings.Contains(err.Error(), "has ended") {
		t.Errorf("the container joins the namespace of a process of the node: %v", err)
	}
}

// takePid starts a process that has a pid.
func takePid(t *testing.T, pid int) {
	t.Helper()
	eventually(t, fmt.Sprintf("a process has the pid %d", pid), func() bool {
		check(t, os.WriteFile("/proc/sys/kernel/ns_last_pid", []byte(strconv.Itoa(pid-1)), 0))
		other := exec.Command("sleep", "1000000")
		check(t, other.Start())
		end := func() { _ = other.Process.Kill(); _ = other.Wait() }
		if other.Process.Pid == pid {
			t.Cleanup(end)
			return true
		}
		end()
		return false
	})
}
