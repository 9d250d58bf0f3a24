package e2e

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// cri: PodSandboxConfig.metadata PodSandboxMetadata.attempt PodSandboxMetadata.name PodSandboxStatus.metadata
// cri: PodSandboxStatus.state
func TestProperty23_RestartChangesNothing(t *testing.T) {
	n := newNode(t, harness.NoNetwork())
	r := newRecorder(t, n)
	n.WriteConflist("10-test.conflist", r.bridge("one"))
	before := map[string]*runtimeapi.PodSandboxStatus{}
	pids := map[string]int{}
	for _, config := range []*runtimeapi.PodSandboxConfig{
		n.PodConfig("a"), n.PodConfig("b", harness.Attempt(2)), n.PodConfig("host", harness.HostNetwork()), n.PodConfig("stopped"),
	} {
		id := n.RunPod(config)
		pids[id] = pausePID(t, n, id)
		if config.Metadata.Name == "stopped" {
			check(t, stop(t, n, id))
		}
		before[id] = podStatus(t, n, id)
	}
	for _, restart := range []func(){n.Kill, n.Stop} {
		restart()
		r.forget()
		n.Start()
		for id, status := range before {
			if now := podStatus(t, n, id); !proto.Equal(now, status) {
				t.Errorf("before: %v\nafter: %v", status, now)
			}
			if status.State == runtimeapi.PodSandboxState_SANDBOX_READY && pausePID(t, n, id) != pids[id] {
				t.Errorf("another pause process: %d", pausePID(t, n, id))
			}
		}
		if calls := r.calls(""); len(calls) != 0 {
			t.Errorf("plugins ran: %s", sequence(calls))
		}
	}
	if len(list(t, n, nil)) != len(before) {
		t.Errorf("listed: %v", list(t, n, nil))
	}
	// The names are reserved again, also that of a pod that is stopped, until it is removed.
	for id, status := range before {
		config := n.PodConfig(status.Metadata.Name, harness.Attempt(status.Metadata.Attempt))
		switch {
		case status.Metadata.Name == "host":
		case status.State == runtimeapi.PodSandboxState_SANDBOX_READY:
			if again := n.RunPod(config); again != id {
				t.Errorf("pod %s got a second sandbox %s", id, again)
			}
		default:
			_, err := run(t, n, config)
			wantCode(t, err, codes.AlreadyExists)
			check(t, remove(t, n, id))
			if n.RunPod(config) == id {
				t.Error("a removed sandbox came back")
			}
		}
	}
}

func TestPauseThatDiedWhileTheDaemonWasDown(t *testing.T) {
	n := newNode(t)
	dies, lives := n.RunPod(n.PodConfig("dies")), n.RunPod(n.PodConfig("lives"))
	pid := pausePID(t, n, dies)
	n.Kill()
	check(t, unix.Kill(pid, unix.SIGKILL))
	eventually(t, "pause is gone", patience, func() bool { return !alive(pid) })
	n.Start()
	if ready(t, n, dies) || !ready(t, n, lives) {
		t.Errorf("got %v", list(t, n, nil))
	}
	check(t, stop(t, n, dies))
	if held := addresses(t, n); len(held) != 1 {
		t.Errorf("held: %v", held)
	}
}

// The quickest of a few tries counts: the machine does other work, too.
func TestPauseThatDiesIsSeenAtOnce(t *testing.T) {
	n := newNode(t)
	var attempt uint32
	dies := func(restarted bool) (took time.Duration) {
		id := n.RunPod(n.PodConfig("web", harness.Attempt(attempt)))
		attempt++
		if restarted {
			n.Kill()
			n.Start()
		}
		check(t, unix.Kill(pausePID(t, n, id), unix.SIGKILL))
		began := time.Now()
		eventually(t, "the pod is NotReady", patience, func() bool { return !ready(t, n, id) })
		return time.Since(began)
	}
	for _, restarted := range []bool{false, true} {
		took := dies(restarted)
		for tries := 1; took > time.Second && tries < 5; tries++ {
			took = min(took, dies(restarted))
		}
		if took > time.Second {
			t.Errorf("the pod is Ready for %v more, daemon restarted: %v", took, restarted)
		}
	}
	if _, err := run(t, n, n.PodConfig("web", harness.Attempt(attempt-1))); err == nil {
		t.Error("the attempt that died was handed out again")
	}
	n.RunPod(n.PodConfig("web", harness.Attempt(attempt)))
}

// What stands in the place of a file, and cannot be read as one, costs its pod
// nothing and blocks nothing: check names it, and when the file is back the pod is
// what it was.
func TestWhatIsNoFileCostsNoPod(t *testing.T) {
	for kind, put := range map[string]func(path string) error{
		"directory": func(path string) error { return os.Mkdir(path, 0o700) },
		"fifo":      func(path string) error { return unix.Mkfifo(path, 0o600) },
		"loop":      func(path string) error { return os.Symlink(filepath.Base(path), path) }, // ELOOP
	} {
		t.Run(kind, func(t *testing.T) {
			n := newNode(t)
			ids := map[string]string{}
			for _, name := range []string{"record", "facts", "attachment"} {
				ids[name] = n.RunPod(n.PodConfig(name))
			}
			files := map[string]string{
				"record":     filepath.Join(n.Root, "sandboxes", ids["record"]+".json"),
				"facts":      filepath.Join(n.State, "facts", ids["facts"]+".json"),
				"attachment": filepath.Join(n.Root, "attachments", ids["attachment"]+".json"),
			}
			pids, was := map[string]int{}, map[string]*runtimeapi.PodSandboxStatus{}
			for name, id := range ids {
				pids[name], was[name] = pausePID(t, n, id), podStatus(t, n, id)
			}
			n.Kill()
			for _, file := range files {
				check(t, os.Rename(file, file+".aside"))
				check(t, put(file))
			}
			n.Start()
			if shown := statusInfo(t, n)["quarantinedRecords"]; !strings.Contains(shown, files["record"]) || len(list(t, n, nil)) != 2 {
				t.Errorf("the verbose status shows %s, listed are %v", shown, list(t, n, nil))
			}
			output, err := n.RunCommand("check")
			for name, file := range files {
				if err == nil || !strings.Contains(output, file) {
					t.Errorf("check says nothing of %s: %v\n%s", file, err, output)
				}
				if unix.Kill(pids[name], 0) != nil {
					t.Errorf("the pod whose %s cannot be read was ended", name)
				}
			}
			n.Kill()
			for _, file := range files {
				check(t, os.Remove(file))
				check(t, os.Rename(file+".aside", file))
			}
			n.Start()
			for name, id := range ids {
				if now := podStatus(t, n, id); !proto.Equal(now, was[name]) || pausePID(t, n, id) != pids[name] {
					t.Errorf("%s is back, and its pod is not what it was:\nwas %v\nis  %v", name, was[name], now)
				}
			}
		})
	}
}
