package e2e

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
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

// cgroupDir is the directory of a cgroup, in one hierarchy of version 1 or in version
// 2 alone.
func cgroupDir(path string) string {
	if cgroup.Unified() {
		return filepath.Join("/sys/fs/cgroup", path)
	}
	return filepath.Join("/sys/fs/cgroup/pids", path)
}

// What pods and containers leave is seen and removed: namespaces, files, cgroups with what
// runs in them, mounts, volumes; and nothing of another node.
func TestCheckFindsAndRemovesOrphans(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	mark := strings.TrimSuffix(filepath.Base(verbose(t, n, id).NetNamespace), id)
	node := strings.TrimSuffix(strings.TrimPrefix(mark, "minicri-"), "-")
	name := strings.Repeat("ab", 32)
	group, pause := n.MakeCgroup("minicri-c-"+node+"-"+name), n.MakeCgroup(mark+"4567")
	foreign := n.MakeCgroup("minicri-c-00000000-" + name)
	process := exec.Command("sleep", "600")
	check(t, process.Start())
	ended := make(chan error, 1)
	go func() { ended <- process.Wait() }()
	check(t, os.WriteFile(filepath.Join(cgroupDir(group), "cgroup.procs"), []byte(strconv.Itoa(process.Process.Pid)), 0))
	rootfs := filepath.Join(n.State, "containers", name, "rootfs")
	left := []string{filepath.Join(n.State, "containers", name), filepath.Join(n.Root, "container-volumes", name), filepath.Join(n.State, "sandboxes", strings.Repeat("89ab", 16))}
	for _, dir := range append(left, rootfs) {
		check(t, os.MkdirAll(dir, 0o700))
	}
	check(t, unix.Mount("left", rootfs, "tmpfs", 0, "size=64k"))
	orphan, notOurs := filepath.Join(n.Netns, mark+"0123"), filepath.Join(n.Netns, "not-ours")
	for _, path := range []string{orphan, notOurs} {
		check(t, os.WriteFile(path, nil, 0o444))
	}

	if found, clean := problems(t, n); clean || len(found) != 6 {
		t.Errorf("want the 6 orphans, got %v, clean %v", found, clean)
	}
	if left, clean := problems(t, n, "--fix"); !clean {
		t.Errorf("after --fix: %v", left)
	}
	for _, path := range append(left, orphan, cgroupDir(group), cgroupDir(pause)) {
		if _, err := os.Lstat(path); err == nil {
			t.Errorf("%s is still there", path)
		}
	}
	select {
	case <-ended:
	case <-time.After(patience):
		t.Error("the process runs on")
	}
	if _, err := os.Lstat(cgroupDir(foreign)); err != nil && harness.CgroupDriver() != "systemd" {
		t.Errorf("the cgroup of another node was removed: %v", err)
	}
	check(t, os.Remove(notOurs))
	if found, clean := problems(t, n); !clean || !ready(t, n, id) {
		t.Errorf("the node has problems: %v", found)
	}
}

// What is left of a pod and its container whose records were removed by hand is
// found and removed, without a daemon too.
func TestCheckRemovesWhatHasNoRecord(t *testing.T) {
	n := newNode(t)
	n.ImportBusybox()
	config := n.PodConfig("web", harness.HostNetwork())
	pod := n.RunPod(config)
	created, err := n.Runtime.CreateContainer(limited(t), &runtimeapi.CreateContainerRequest{PodSandboxId: pod, SandboxConfig: config, Config: &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: "app"}, Image: &runtimeapi.ImageSpec{Image: harness.BusyboxImage}, Command: []string{"true"}, LogPath: "app.log",
	}})
	check(t, err)
	id := created.ContainerId
	n.Stop()
	for _, record := range []string{filepath.Join("containers", id), filepath.Join("sandboxes", pod)} {
		check(t, os.Remove(filepath.Join(n.Root, record+".json")))
	}
	found, clean := problems(t, n)
	for _, facts := range []string{filepath.Join(n.Root, "container-facts", id+".json"), filepath.Join(n.State, "facts", pod+".json")} {
		if clean || !slices.ContainsFunc(found, func(f nodecheck.Finding) bool { return strings.Contains(f.Message, facts) }) {
			t.Errorf("%s is not found: %v", facts, found)
		}
	}
	if left, clean := problems(t, n, "--fix"); !clean {
		t.Errorf("after --fix: %v", left)
	}
	if left, clean := problems(t, n); !clean {
		t.Errorf("looked again: %v", left)
	}
	n.Start()
}

// A record that cannot be decoded is shown until an administrator repairs it, which --fix
// notices, or gives it up with --force, which removes what it describes at the next
// start; --force alone is refused.
func TestCheckForcesWhatIsInQuarantine(t *testing.T) {
	n := newNode(t)
	mended, givenUp := n.RunPod(n.PodConfig("mended")), n.RunPod(n.PodConfig("given-up"))
	record := func(id string) string { return filepath.Join(n.Root, "sandboxes", id+".json") }
	n.Kill()
	whole, err := os.ReadFile(record(mended))
	check(t, err)
	for _, id := range []string{mended, givenUp} {
		check(t, os.WriteFile(record(id), []byte("nonsense"), 0o600))
	}
	n.Start()
	quarantined := func() []string {
		files, err := filepath.Glob(filepath.Join(n.Root, "sandboxes", "quarantine", "*"))
		check(t, err)
		return files
	}
	if files := quarantined(); len(files) != 2 {
		t.Fatalf("in quarantine: %v", files)
	}
	output, err := n.RunCommand("check")
	if err == nil || strings.Count(output, "cannot be decoded") != 2 {
		t.Errorf("check of a node with records in quarantine: %v\n%s", err, output)
	}
	if _, err := n.RunCommand("check", "--force"); err == nil {
		t.Error("--force without --fix is taken")
	}
	for _, file := range quarantined() {
		if strings.Contains(file, mended) {
			check(t, os.WriteFile(file, whole, 0o600))
		}
	}
	if output, err := n.RunCommand("check", "--fix"); err == nil || !strings.Contains(output, "not fixed") {
		t.Errorf("check --fix: %s", output)
	}
	if files := quarantined(); len(files) != 1 || !strings.Contains(files[0], givenUp) {
		t.Errorf("in quarantine after --fix: %v", files)
	}
	if output, err := n.RunCommand("check", "--fix", "--force"); err != nil {
		t.Errorf("check --fix --force: %v\n%s", err, output)
	}
	n.Restart()
	if pods := list(t, n, nil); len(pods) != 1 || pods[0].Id != mended || !ready(t, n, mended) {
		t.Errorf("listed: %v", pods)
	}
	eventually(t, "what was given up is removed", patience, func() bool {
		left, _ := filepath.Glob(filepath.Join(n.Netns, "*"+givenUp))
		return len(left) == 0
	})
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
