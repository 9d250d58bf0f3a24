package container

import (
	"os"
	"path/filepath"
	"strings"
	"testing"

	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// runc is Debian's, which hack/unpack has unpacked for the tests.
func runc(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../../bin/debian/usr/sbin/runc")
	check(t, err)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("run 'make peers-test' first: %v", err)
	}
	return path
}

// The containers of a pod are made by the runtime of its handler: runc keeps
// its own state of them, and libcontainer in the shim has none.
func TestHandlerOfTypeOCI(t *testing.T) {
	n := newNode(t, harness.Runtime("runc", runc(t)))
	p := runPod(t, n, "web")
	id := p.run("app", "trap 'exit 5' USR1; echo hello; while :; do sleep 0.05; done")
	if states := statesOf(t, n, "oci/runc/states", id); states != 1 {
		t.Errorf("runc has %d states of the container, want 1", states)
	}
	if states := statesOf(t, n, "containers", id); states != 0 {
		t.Errorf("libcontainer has %d states of the container, want none", states)
	}
	same(t, "exec", p.exec(id, "echo from exec"), "from exec")

	n.Kill()
	n.Start()
	check(t, p.stop(id, 20))
	p.wantExit(id, 5, "Error")
	if stdout, _ := p.logs(id); stdout != "hello\n" {
		t.Errorf("log: %q", stdout)
	}
	p.wantExit(p.run("oom", "tail /dev/zero", memory(16<<20)), 137, "OOMKilled")
	absent := p.create(shell("absent", "", command("/no/such")))
	if err := p.start(absent); err == nil || !strings.Contains(err.Error(), "/no/such") {
		t.Errorf("start of a program that is not there: %v", err)
	}
	p.wantExit(absent, 128, "StartError")
}

// statesOf counts the directories named like the container below a directory
// of any shim.
func statesOf(t *testing.T, n *harness.Node, below, id string) int {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(n.State, "shim*", "*", below, id))
	check(t, err)
	more, err := filepath.Glob(filepath.Join(n.State, "shim*", below, id))
	check(t, err)
	return len(found) + len(more)
}

// A handler whose runtime is not there fails its own pods before anything is
// made, is named by Status, and keeps nobody else from running.
func TestHandlerWithoutItsRuntime(t *testing.T) {
	n := newNode(t, harness.Runtime("gone", "/no/such/runtime"))
	_, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web"), RuntimeHandler: "gone"})
	wantCode(t, err, codes.Unavailable)
	if err == nil || !strings.Contains(err.Error(), "/no/such/runtime") {
		t.Errorf("the error does not name the program: %v", err)
	}
	_, err = n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web"), RuntimeHandler: "kata"})
	wantCode(t, err, codes.InvalidArgument)
	answer, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{Verbose: true})
	check(t, err)
	said := ""
	for _, condition := range answer.Status.Conditions {
		switch condition.Type {
		case "RuntimeHandlersReady":
			said = condition.Message
			if condition.Status {
				t.Error("all handlers are ready")
			}
		case runtimeapi.RuntimeReady:
			if !condition.Status {
				t.Error("the runtime is not ready for a handler's sake")
			}
		}
	}
	if !strings.Contains(said, "gone") || !strings.Contains(answer.Info["runtimeHandlers"], "/no/such/runtime") {
		t.Errorf("Status says %q and %s", said, answer.Info["runtimeHandlers"])
	}
	_, err = n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("other")})
	check(t, err)
}
