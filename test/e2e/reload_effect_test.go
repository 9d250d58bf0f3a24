package e2e

import (
	"fmt"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// A new log level counts for the next line, without a restart.
func TestReloadOfLevel(t *testing.T) {
	n := newNode(t, harness.LevelOfFile(), harness.Config("log_level = 'info'\n"))
	const line = "level=DEBUG msg=call method=ListPodSandbox"
	lines := func() int {
		list(t, n, nil)
		return strings.Count(n.Log(), line)
	}
	if lines() > 0 {
		t.Error("a line of level debug is in the log")
	}
	pid := n.PID()
	rewrite(t, n, "log_level = 'info'", "log_level = 'debug'")
	check(t, syscall.Kill(pid, syscall.SIGHUP))
	eventually(t, "the level is reloaded", patience, func() bool { return lines() > 0 })
	if n.PID() != pid || strings.Contains(n.Log(), "need a restart") {
		t.Error("the daemon was restarted, or wants to be")
	}
	rewrite(t, n, "log_level = 'debug'", "log_level = 'warn'")
	check(t, syscall.Kill(pid, syscall.SIGHUP))
	eventually(t, "no line of level debug comes", patience, func() bool { return strings.Count(n.Log(), line) == lines() })
}

// A runtime handler that is added runs containers; one that is removed is refused,
// and the pods that it has are stopped and removed as before.
func TestReloadOfRuntimes(t *testing.T) {
	n := newNode(t, harness.Config(fast))
	n.ImportBusybox()
	runc, err := filepath.Abs("../../bin/debian/usr/sbin/runc")
	check(t, err)
	pod := func(name string) (string, error) {
		answer, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig(name), RuntimeHandler: "late"})
		return answer.GetPodSandboxId(), err
	}
	handlers := func() (names string) {
		answer, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{})
		check(t, err)
		for _, h := range answer.RuntimeHandlers {
			names += h.Name + " "
		}
		return names
	}
	_, err = pod("early")
	wantCode(t, err, codes.InvalidArgument)

	table := fmt.Sprintf("[runtimes.late]\ntype = 'oci'\npath = '%s'\n", runc)
	rewrite(t, n, "[limits]", table+"[limits]")
	eventually(t, "the handler is there", patience, func() bool { return strings.Contains(handlers(), "late") })
	id, err := pod("web")
	check(t, err)
	made, err := n.Runtime.CreateContainer(limited(t), &runtimeapi.CreateContainerRequest{PodSandboxId: id, SandboxConfig: n.PodConfig("web"), Config: &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "app"}, Image: &runtimeapi.ImageSpec{Image: harness.BusyboxImage}, Command: []string{"/bin/sleep", "1000000"},
	}})
	check(t, err)
	_, err = n.Runtime.StartContainer(limited(t), &runtimeapi.StartContainerRequest{ContainerId: made.ContainerId})
	check(t, err)

	rewrite(t, n, table, "")
	eventually(t, "the handler is gone", patience, func() bool { return !strings.Contains(handlers(), "late") })
	_, err = pod("refused")
	wantCode(t, err, codes.InvalidArgument)
	if !ready(t, n, id) {
		t.Error("the pod of the handler is not ready any more")
	}
	check(t, stop(t, n, id))
	check(t, remove(t, n, id))
}

// Periods that were hours, or none, count at once when they are shorter, and a DEL
// that waits for an hour does not.
func TestReloadOfPeriods(t *testing.T) {
	n := newNode(t, harness.NoNetwork(), harness.Config(`[limits]
reload = "1h"
status_period = "1h"
gc_period = "0s"
check_period = "0s"
retry_first = "1h"
retry_most = "1h"
detach_time = "1h"
`))
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"))
	n.RunPod(n.PodConfig("web"))
	id := n.RunPod(n.PodConfig("gone"))
	r.order("one", "DEL", "fail 11 not now")
	if err := stop(t, n, id); err == nil {
		t.Fatal("a DEL that fails is no error")
	}
	r.order("one", "DEL", "")
	if asked := len(r.calls("GC")) + len(r.calls("CHECK")); asked != 0 {
		t.Fatalf("GC and CHECK ran %d times, though they are off", asked)
	}
	statuses := len(r.calls("STATUS"))
	rewrite(t, n, "reload = \"1h\"", "reload = \"20ms\"")
	rewrite(t, n, "status_period = \"1h\"\ngc_period = \"0s\"\ncheck_period = \"0s\"\nretry_first = \"1h\"\nretry_most = \"1h\"",
		"status_period = \"50ms\"\ngc_period = \"50ms\"\ncheck_period = \"50ms\"\nretry_first = \"50ms\"\nretry_most = \"50ms\"")
	check(t, syscall.Kill(n.PID(), syscall.SIGHUP))
	eventually(t, "the plugins are asked again and again", patience, func() bool {
		return len(r.calls("STATUS")) >= statuses+3 && len(r.calls("GC")) >= 3 && len(r.calls("CHECK")) >= 3
	})
	eventually(t, "the DEL is retried", patience, func() bool { return len(addresses(t, n)) == 1 })
	if isReady, reason := networkReady(t, n); !isReady {
		t.Errorf("the network is not ready: %s", reason)
	}
	n.WriteConflist("10-test.conflist", r.bridge("one"), r.plugin("two", nil))
	eventually(t, "the directory is looked at", patience, func() bool { return strings.Contains(fmt.Sprint(harness.Info[any](t, n, "cniconfig")), "two") })
}
