package release

import (
	"encoding/json"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
)

// laterDaemon builds the daemon of a later version: with a key that this one does not have,
// and a later schema of the records of pods and containers.
func laterDaemon(t *testing.T) string {
	t.Helper()
	dir := t.TempDir()
	overlay := map[string]map[string]string{"Replace": {}}
	for file, change := range map[string][2]string{
		"internal/state/records.go": {"Open[R](records, 1, ", "Open[R](records, 2, "},
		"internal/config/config.go": {"type Config struct {", "type Config struct {\n\tTomorrow string `toml:\"tomorrow\" comment:\"a key of tomorrow\"`"},
	} {
		path := absolute(t, "../../"+file)
		source, err := os.ReadFile(path)
		check(t, err)
		changed := strings.Replace(string(source), change[0], change[1], 1)
		if changed == string(source) {
			t.Fatalf("%s has no %q", file, change[0])
		}
		replacement := filepath.Join(dir, filepath.Base(file))
		check(t, os.WriteFile(replacement, []byte(changed), 0o600))
		overlay["Replace"][path] = replacement
	}
	list, err := json.Marshal(overlay)
	check(t, err)
	check(t, os.WriteFile(dir+"/overlay.json", list, 0o600))
	build := exec.Command("go", "build", "-C", "../..", "-trimpath", "-buildvcs=false", "-overlay", dir+"/overlay.json",
		"-ldflags", "-X main.version=99.0.0", "-tags", "grpcnotrace,nri_no_wasm", "-o", dir+"/minicri", "./cmd/minicri")
	build.Env = append(os.Environ(), "CGO_ENABLED=0")
	if out, err := build.CombinedOutput(); err != nil {
		t.Fatalf("build a later version: %v: %s", err, out)
	}
	return dir + "/minicri"
}

// TestOlderBuildOnLaterState starts each of two builds on what the other has left: the
// later one takes over, the older one starts where it can, and says in one line where it
// cannot.
func TestOlderBuildOnLaterState(t *testing.T) {
	run(t, "dpkg", "-i", file(t, "amd64.deb"))
	defer run(t, "dpkg", "--purge", "minicri")
	defer os.RemoveAll("/etc/minicri")
	newer := []string{laterDaemon(t), "--shim", "/usr/bin/minicri-shim"}
	const dropIn = "/etc/minicri/config.toml.d/10-later.toml"
	check(t, os.MkdirAll(filepath.Dir(dropIn), 0o755))
	check(t, os.WriteFile(dropIn, []byte("[default_network]\nenabled = true\nsubnet = \"10.99.0.0/16\"\n"), 0o644))

	stop := serve(t)
	old := runPod(t, "old")
	pause := pausePID(t, connect(t), old)
	stop()
	stop = serve(t, newer...)
	if now := pausePID(t, connect(t), old); now != pause {
		t.Errorf("under the later build pause was %d, is %d", pause, now)
	}
	removePod(t, old)
	pod := runPod(t, "later")
	pause = pausePID(t, connect(t), pod)
	stop()

	out, err := exec.Command("/usr/bin/minicri").CombinedOutput()
	last := lastLine(string(out))
	if err == nil || !strings.Contains(last, "/var/lib/minicri/") || !strings.Contains(last, "written by 99.0.0") || !strings.Contains(last, "run that version again") {
		t.Errorf("on the later state the older build says %v, %s", err, last)
	}

	check(t, os.WriteFile(dropIn, []byte("tomorrow = \"yes\"\n[default_network]\nenabled = true\nsubnet = \"10.99.0.0/16\"\n"), 0o644))
	stop = serve(t, newer...)
	if now := pausePID(t, connect(t), pod); now != pause {
		t.Errorf("after the older build was refused pause was %d, is %d", pause, now)
	}
	removePod(t, pod)
	stop()
	stop = serve(t) // on a configuration with a key that it does not know
	removePod(t, runPod(t, "last"))
	stop()
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// podParent is the cgroup of a pod, as a kubelet has one.
const podParent = "/minicri-release-test"

func runPod(t *testing.T, name string) string {
	t.Helper()
	pod, err := connect(t).RunPodSandbox(t.Context(), &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: name, Uid: name, Namespace: "test"}, LogDirectory: t.TempDir(),
		Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: podParent},
	}})
	check(t, err)
	return pod.PodSandboxId
}

// removePod also removes its parent cgroup, which is a kubelet's.
func removePod(t *testing.T, id string) {
	t.Helper()
	client := connect(t)
	_, err := client.StopPodSandbox(t.Context(), &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	check(t, err)
	_, err = client.RemovePodSandbox(t.Context(), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	check(t, err)
	hierarchies, err := cgroup.FindHierarchies()
	check(t, err)
	check(t, hierarchies.Remove(podParent, time.Minute))
}
