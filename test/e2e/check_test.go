package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	nodecheck "github.com/minicri/minicri/internal/doctor"
	"github.com/minicri/minicri/test/harness"
)

// problems runs `minicri check` and returns what it calls a problem.
func problems(t *testing.T, n *harness.Node, flags ...string) (found []nodecheck.Finding, clean bool) {
	t.Helper()
	output, err := n.RunCommand("check", append(flags, "--json")...)
	if _, exited := err.(*exec.ExitError); err != nil && !exited {
		t.Fatal(err)
	}
	var findings []nodecheck.Finding
	if jsonErr := json.Unmarshal([]byte(output), &findings); jsonErr != nil {
		t.Fatalf("%v in\n%s", jsonErr, output)
	}
	for _, f := range findings {
		if f.Grade == nodecheck.Problem {
			found = append(found, f)
		}
	}
	return found, err == nil
}

func TestCheckIsCleanOnANodeWithPods(t *testing.T) {
	n := newNode(t)
	n.RunPod(n.PodConfig("web"))
	if found, clean := problems(t, n); !clean {
		t.Errorf("a node with a healthy pod has problems: %v", found)
	}
}

func TestCheckFindsAndRemovesStrays(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	mark := strings.TrimSuffix(filepath.Base(verbose(t, n, id).NetNamespace), id)
	stray := filepath.Join(n.Netns, mark+"0123")
	foreign := filepath.Join(n.Netns, "not-ours")
	for _, path := range []string{stray, foreign} {
		check(t, os.WriteFile(path, nil, 0o444))
	}
	cgroup := n.MakeCgroup(mark + "4567")
	files := filepath.Join(n.State, "sandboxes", "89ab")
	check(t, os.Mkdir(files, 0o700))

	found, clean := problems(t, n)
	if clean || len(found) != 3 {
		t.Errorf("want the 3 strays, got %v, clean %v", found, clean)
	}
	if left, clean := problems(t, n, "--fix"); !clean {
		t.Errorf("after --fix: %v", left)
	}
	for _, path := range []string{stray, files, filepath.Join("/sys/fs/cgroup/pids", cgroup)} {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
	if _, err := os.Lstat(foreign); err != nil {
		t.Errorf("what is not ours was removed: %v", err)
	}
	if !ready(t, n, id) {
		t.Error("the pod is not ready any more")
	}
	check(t, os.Remove(foreign))
}

func TestCheckNamesTheFileAndLineOfABrokenConfiguration(t *testing.T) {
	n := newNode(t)
	broken := filepath.Join(n.CNIConf, "99-broken.conflist")
	check(t, os.WriteFile(broken, []byte("{\n \"name\": \"x\",\n oops\n}"), 0o644))
	found, _ := problems(t, n)
	if len(found) != 1 || !strings.Contains(found[0].Message, broken) || !strings.Contains(found[0].Message, "line 3") {
		t.Errorf("want %s and line 3 named, got %v", broken, found)
	}
}

func TestCheckSeesALostNamespace(t *testing.T) {
	n := newNode(t, harness.NoNetwork())
	// Without a namespace the bridge plugin leaves its masquerading behind.
	bridge := n.BridgePlugin()
	bridge["ipMasq"] = false
	n.WriteConflist("10-test.conflist", bridge)
	id := n.RunPod(n.PodConfig("web"))
	check(t, unix.Unmount(verbose(t, n, id).NetNamespace, unix.MNT_DETACH))
	found, _ := problems(t, n)
	if len(found) != 1 || !strings.Contains(found[0].Message, id) || !strings.Contains(found[0].Message, "namespace") {
		t.Errorf("want %s without its namespace, got %v", id, found)
	}
}
