package container

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// A shim that lies or dies fails its own pod, with an error that says what
// it did; the daemon and other pods continue, and nothing is left, of the shim
// neither. No foreign process is touched.
func TestHostileShims(t *testing.T) {
	dir := t.TempDir()
	built := buildHostileShim(t, dir)
	for mode, says := range map[string]string{
		"rubbish":  "is not the address of a unix socket",
		"longpath": "characters long",
		"grpc":     `speaks version 3 of the task API over "grpc"`,
		"nowhere":  "connect to the shim",
		"shimpid":  "says that it is process 1, which was not started here",
		"pid":      "has started process 1, which is not one of its own",
		"dies":     "shim: create: ttrpc: closed",
	} {
		t.Run(mode, func(t *testing.T) {
			path := filepath.Join(dir, "containerd-shim-"+mode+"-v2")
			check(t, os.Link(built, path))
			n := newNode(t, harness.Runtime("hostile", path), harness.Config("[limits]\nrun = '15s'\ncni_add = '15s'"))
			began := time.Now()
			_, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web"), RuntimeHandler: "hostile"})
			if err == nil || !strings.Contains(err.Error(), says) || len(err.Error()) > 5000 {
				t.Errorf("got %.1000v, want an error that says %q", err, says)
			}
			if took := time.Since(began); took > time.Minute {
				t.Errorf("it took %v", took)
			}
			p := &pod{Node: n, t: t, id: runBuiltin(t, n, "other"), config: n.PodConfig("other")}
			p.exec(p.run("app", forever), "true")
			n.RemovePod(p.id)
			pods, err := n.Runtime.ListPodSandbox(limited(t), &runtimeapi.ListPodSandboxRequest{})
			check(t, err)
			for _, left := range pods.Items {
				removeAtLast(t, n, left.Id)
			}
			eventually(t, "the shim has ended", func() bool { return len(programsOf(path)) == 0 })
		})
	}
}

// removeAtLast removes a pod as a kubelet does: again and again, until it is gone.
func removeAtLast(t *testing.T, n *harness.Node, id string) {
	t.Helper()
	eventually(t, "the pod is removed", func() bool {
		_, err := n.Runtime.StopPodSandbox(limited(t), &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
		if err == nil {
			_, err = n.Runtime.RemovePodSandbox(limited(t), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
		}
		return err == nil
	})
}

// programsOf are the processes that run a program.
func programsOf(path string) (pids []string) {
	files, _ := filepath.Glob("/proc/[0-9]*/exe")
	for _, file := range files {
		if to, err := os.Readlink(file); err == nil && to == path {
			pids = append(pids, file)
		}
	}
	return pids
}

func buildHostileShim(t *testing.T, dir string) (path string) {
	t.Helper()
	path = filepath.Join(dir, "hostileshim")
	if output, err := exec.Command("go", "build", "-o", path, "./hostileshim").CombinedOutput(); err != nil {
		t.Fatalf("%v: %s", err, output)
	}
	return path
}

// A shim that hangs in a call holds up its own pod alone, and no longer than the
// limits say: the pod can be removed, and with it go the shim and all that it
// has started.
func TestShimsThatHang(t *testing.T) {
	real, err := exec.LookPath("containerd-shim-runc-v2")
	check(t, err)
	if real, err = filepath.EvalSymlinks(real); err != nil {
		t.Fatal(err)
	}
	dir := t.TempDir()
	built := buildHostileShim(t, dir)
	for _, call := range []string{"start", "state", "wait", "kill", "delete", "shutdown"} {
		t.Run(call, func(t *testing.T) {
			path := filepath.Join(dir, "containerd-shim-hangsin"+call+"-v2")
			check(t, os.Link(built, path))
			n := newNode(t, harness.Runtime("hanging", path), harness.Config("[limits]\nrun = '15s'\ncni_add = '15s'"))
			other := &pod{Node: n, t: t, id: runBuiltin(t, n, "other"), config: n.PodConfig("other")}
			witness := other.run("app", forever)
			_, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web"), RuntimeHandler: "hanging"})
			if (err != nil) != (call == "start") {
				t.Errorf("RunPodSandbox: %v", err)
			}
			other.exec(witness, "true")
			pods, err := n.Runtime.ListPodSandbox(limited(t), &runtimeapi.ListPodSandboxRequest{})
			check(t, err)
			for _, left := range pods.Items {
				if left.Id != other.id {
					removeAtLast(t, n, left.Id)
				}
			}
			other.exec(witness, "true")
			eventually(t, "the shim has ended", func() bool { return len(programsOf(path)) == 0 && len(shimsBelow(t, n, real)) == 0 })
		})
	}
}

// shimsBelow are the processes of a shim's program that work for a node.
func shimsBelow(t *testing.T, n *harness.Node, path string) (pids []string) {
	t.Helper()
	for _, exe := range programsOf(path) {
		if line, _ := os.ReadFile(filepath.Join(filepath.Dir(exe), "cmdline")); strings.Contains(string(line), n.Dir) {
			pids = append(pids, exe)
		}
	}
	return pids
}
