package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// leftOf is what is kept of pods whose network never worked: namespaces and entries of
// the network's journal.
func leftOf(t *testing.T, n *harness.Node) (namespaces, entries []string) {
	t.Helper()
	namespaces, err := filepath.Glob(filepath.Join(n.Netns, "*"))
	check(t, err)
	entries, err = filepath.Glob(filepath.Join(n.Root, "attachments", "*.json"))
	check(t, err)
	return namespaces, entries
}

// A kubelet that tries a pod forty times whose network can never work fills the node with
// nothing.
func TestWhatCanNeverWorkLeavesNothing(t *testing.T) {
	n := newNode(t, harness.NoNetwork(), harness.Config(fast+"give_up_tries = 3\n"))
	bridge := n.BridgePlugin()
	bridge["ipam"].(harness.Object)["ranges"] = [][]harness.Object{{{"subnet": "10.88.0.0/24", "rangeStart": "10.99.0.1"}}}
	n.WriteConflist("10-test.conflist", bridge)
	for attempt := range 40 {
		config := n.PodConfig("web")
		config.Metadata.Attempt = uint32(attempt)
		if _, err := n.Runtime.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: config}); err == nil {
			t.Fatal("it works")
		}
		if namespaces, _ := leftOf(t, n); len(namespaces) > 1 {
			t.Fatalf("after try %d: %q", attempt, namespaces)
		}
		if attempt == 20 {
			n.Kill()
			n.Start()
		}
	}
	eventually(t, "nothing is left", patience, func() bool {
		namespaces, entries := leftOf(t, n)
		return len(namespaces) == 0 && len(entries) == 0
	})
	if found, clean := problems(t, n); !clean {
		t.Errorf("problems: %v", found)
	}
}

// A person gives up what waits for a DEL that never succeeds.
func TestCheckGivesUpAnAttachment(t *testing.T) {
	n := newNode(t, harness.NoNetwork(), harness.Config(fast+"detach_tries = 1\n"))
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"), r.plugin("two", nil))
	id := n.RunPod(n.PodConfig("web"))
	r.order("two", "DEL", "fail 11 never")
	n.RemovePod(id)
	if found, clean := problems(t, n, "--fix", "--force"); clean || len(found) != 1 || !strings.Contains(found[0].Advice, "--fix --force "+id) {
		t.Errorf("problems: %+v", found)
	}
	if found, clean := problems(t, n, "--fix", "--force", id); !clean {
		t.Errorf("problems: %v", found)
	}
	eventually(t, "the daemon gives it up too", patience, func() bool {
		return len(pending(t, n)) == 0 && strings.Contains(n.Log(), "given up by hand")
	})
	r.order("two", "DEL", "")
}

// What a daemon is about to do is no problem.
func TestCheckBesidePodsThatComeAndGo(t *testing.T) {
	n := newNode(t)
	over := make(chan struct{})
	var pods sync.WaitGroup
	for worker := range 3 {
		pods.Go(func() {
			for i := 0; ; i++ {
				select {
				case <-over:
					return
				default:
					n.RemovePod(n.RunPod(n.PodConfig(fmt.Sprint("web-", worker, "-", i))))
				}
			}
		})
	}
	for range 8 {
		if found, clean := problems(t, n); !clean {
			t.Errorf("problems: %v", found)
		}
	}
	close(over)
	pods.Wait()
}

// Who asks for a name that exists with another runtime, or other namespaces, gets no pod
// of another kind.
func TestNameThatExistsWithOtherWishes(t *testing.T) {
	n := newNode(t)
	config := n.PodConfig("web")
	id := n.RunPod(config)
	same, err := n.Runtime.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: config})
	if err != nil || same.GetPodSandboxId() != id {
		t.Errorf("the same request got %q, %v", same.GetPodSandboxId(), err)
	}
	other := n.PodConfig("web", harness.HostNetwork())
	_, err = n.Runtime.RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: other})
	wantCode(t, err, codes.AlreadyExists)
	if err != nil && !strings.Contains(err.Error(), "config.hostname differs") {
		t.Errorf("it does not say what differs: %v", err)
	}
}

// Annotations as large as the API server takes them, and the kubelet's own.
func TestLargeAnnotations(t *testing.T) {
	n := newNode(t)
	config := n.PodConfig("web")
	config.Annotations = map[string]string{"large": strings.Repeat("x", 256<<10), "kubernetes.io/config.seen": "2026-11-23T08:00:00Z"}
	n.RemovePod(n.RunPod(config))
}

// A root behind a symlink, as operators have it on another disk.
func TestRootBehindALink(t *testing.T) {
	n := newNode(t)
	n.Kill()
	check(t, os.Rename(n.Root, n.Root+"-real"))
	check(t, os.Symlink(n.Root+"-real", n.Root))
	n.Start()
	n.RemovePod(n.RunPod(n.PodConfig("web")))
	n.Kill()
	check(t, os.Remove(n.Root))
	check(t, os.Rename(n.Root+"-real", n.Root))
	n.Start()
}

// A daemon whose pods cannot be executed does not start, and says by which key; one
// that cannot make a pause is not ready, and is once it can.
func TestNodeThatCannotMakeAPause(t *testing.T) {
	n := newNode(t)
	n.Stop()
	check(t, unix.Mount("noexec", n.Root, "tmpfs", unix.MS_NOEXEC, "size=64m"))
	output, err := n.RunDaemon()
	check(t, unix.Unmount(n.Root, 0))
	if err == nil || !strings.Contains(output, "root: ") || !strings.Contains(output, "noexec") {
		t.Errorf("on a noexec mount: %v, %s", err, output)
	}
	most := filepath.Join(cgroupDir(n.CgroupParent), "pids.max")
	check(t, os.WriteFile(most, []byte("0"), 0))
	n.Start()
	eventually(t, "the node says that it is not ready, and why", patience, func() bool {
		is, message := condition(t, n, runtimeapi.RuntimeReady)
		return !is && strings.Contains(message, "a pause did not start")
	})
	check(t, os.WriteFile(most, []byte("max"), 0))
	eventually(t, "the node is ready", patience, func() bool { is, _ := condition(t, n, runtimeapi.RuntimeReady); return is })
	n.RemovePod(n.RunPod(n.PodConfig("web")))
}
