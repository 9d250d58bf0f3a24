package release

import (
	"encoding/json"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
)

// laterDaemon builds the daemon of a later version: with a key that this one does not have,
// and a later schema of the records of pods and containers.
func laterDaemon(t *testing.T) string {
	dir := t.TempDir()
	overlay := map[string]map[string]string{"Replace": {}}
	for file, change := range map[string][2]string{
		"internal/state/records.go": {"Open[R](records, 1, ", "Open[R](records, 2, "},
		"internal/config/config.go": {"type Config struct {", "type Config struct {\n\tTomorrow string `toml:\"tomorrow\" comment:\"a key of tomorrow\"`"},
	} {
		path := absolute(t, "../../"+file)
		source := string(harness.Read(t, path))
		harness.Want(t, strings.Contains(source, change[0]), "%s has no %q", file, change[0])
		changed := strings.Replace(source, change[0], change[1], 1)
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
	out, err := build.CombinedOutput()
	harness.Need(t, err == nil, "build a later version: %v: %s", err, out)
	return dir + "/minicri"
}

// TestOlderBuildOnLaterState starts each of two builds on what the other has left: the later one takes over, the
// older one starts where it can, and says in one line where it cannot.
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
	harness.Same(t, "pause under the later build", pausePID(t, connect(t), old), pause)
	removePod(t, old)
	pod := runPod(t, "later")
	pause = pausePID(t, connect(t), pod)
	stop()

	out, err := exec.Command("/usr/bin/minicri").CombinedOutput()
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	harness.WantError(t, errors.Join(err, errors.New(lines[len(lines)-1])), "exit status", "/var/lib/minicri/", "written by 99.0.0", "run that version again")

	check(t, os.WriteFile(dropIn, []byte("tomorrow = \"yes\"\n[default_network]\nenabled = true\nsubnet = \"10.99.0.0/16\"\n"), 0o644))
	stop = serve(t, newer...)
	harness.Same(t, "pause after the older build was refused", pausePID(t, connect(t), pod), pause)
	removePod(t, pod)
	stop()
	stop = serve(t) // on a configuration with a key that it does not know
	removePod(t, runPod(t, "last"))
	stop()
}

// podParent is the cgroup of a pod, as a kubelet has one.
const podParent = "/minicri-release-test"

func runPod(t *testing.T, name string) string {
	return harness.Call(t, connect(t).RunPodSandbox, &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: name, Uid: name, Namespace: "test"}, LogDirectory: t.TempDir(),
		Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: podParent},
	}}).PodSandboxId
}

// removePod also removes its parent cgroup, which is a kubelet's.
func removePod(t *testing.T, id string) {
	client := connect(t)
	harness.Call(t, client.StopPodSandbox, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	harness.Call(t, client.RemovePodSandbox, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	hierarchies, err := cgroup.FindHierarchies()
	check(t, err)
	check(t, hierarchies.Remove(podParent, time.Minute))
}
