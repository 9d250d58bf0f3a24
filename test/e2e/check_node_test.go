package e2e

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	nodecheck "github.com/minicri/minicri/internal/doctor"
	"github.com/minicri/minicri/test/harness"
)

// finds reports whether a problem of that subject has the text in its message.
func finds(found []nodecheck.Finding, subject, text string) bool {
	return slices.ContainsFunc(found, func(f nodecheck.Finding) bool { return f.Subject == subject && strings.Contains(f.Message, text) })
}

// What the daemon says of itself is what a check says of the node, and a network that
// names a plugin or an IPAM plugin that is not there is a problem, the embedded one too.
func TestCheckIsRedWherePodsFail(t *testing.T) {
	n := newDefaultNode(t, "10.88.0.0/16")
	if found, clean := problems(t, n, "--pod"); !clean {
		t.Fatalf("the embedded network with its plugins: %v", found)
	}
	if pods := list(t, n, nil); len(pods) != 0 {
		t.Errorf("--pod leaves %v", pods)
	}
	if found, _ := problems(t, n, "--cni-bin-dir", t.TempDir()); !finds(found, "network", "host-local") || !finds(found, "network", "bridge") {
		t.Errorf("an empty directory of plugins: %v", found)
	}
	bridge := n.BridgePlugin()
	bridge["ipam"] = harness.Object{"type": "not-installed"}
	n.WriteConflist("20-ipam.conflist", bridge)
	if found, _ := problems(t, n); !finds(found, "network", "not-installed") {
		t.Errorf("an IPAM plugin that is not there: %v", found)
	}
	broken := filepath.Join(n.CNIConf, "99-broken.conflist")
	check(t, os.WriteFile(broken, []byte("{\n \"name\": \"x\",\n oops\n}"), 0o644))
	if found, _ := problems(t, n); !slices.ContainsFunc(found, func(f nodecheck.Finding) bool {
		return strings.Contains(f.Message, broken) && strings.Contains(f.Message, "line 3")
	}) {
		t.Errorf("want %s and line 3 named, got %v", broken, found)
	}
	n.WriteConflist("10-first.conflist", harness.Object{"type": "missing"})
	eventually(t, "the daemon sees the file", patience, func() bool { is, said := networkReady(t, n); return !is && strings.Contains(said, "missing") })
	if found, clean := problems(t, n); clean || !finds(found, "NetworkReady", "missing") || !finds(found, "network", "missing") {
		t.Errorf("a network that is not ready: %v", found)
	}
}

// A check without a daemon names what no daemon could run pods with.
func TestCheckBeforeTheFirstStart(t *testing.T) {
	n := newNode(t)
	config := filepath.Join(t.TempDir(), "config.toml")
	look := func(toml string, flags ...string) []nodecheck.Finding {
		t.Helper()
		check(t, os.WriteFile(config, []byte(toml), 0o600))
		found, clean := problems(t, n, append([]string{"--config", config, "--socket", filepath.Join(t.TempDir(), "none")}, flags...)...)
		if clean {
			t.Errorf("%s %v: no problem", toml, flags)
		}
		return found
	}
	if found := look("[streaming]\ntls_cert = '/nowhere/cert.pem'\ntls_key = '/nowhere/key.pem'\n"); !finds(found, "configuration", "/nowhere/cert.pem") {
		t.Errorf("a certificate that is not there: %v", found)
	}
	if found := look("", "--pod"); !finds(found, "pod", "no daemon serves") {
		t.Errorf("a pod without a daemon: %v", found)
	}
	dirs := t.TempDir()
	check(t, unix.Mount("small", dirs, "tmpfs", 0, "size=1m,nr_inodes=64"))
	t.Cleanup(func() { check(t, unix.Unmount(dirs, unix.MNT_DETACH)) })
	if found := look("", "--root", filepath.Join(dirs, "new", "root")); !finds(found, "root", "are free in the file system of "+dirs) || !finds(found, "root", "inodes") {
		t.Errorf("a full disk: %v", found)
	}
	for _, dir := range []string{"lower", "upper", "work", "merged"} {
		check(t, os.Mkdir(filepath.Join(dirs, dir), 0o755))
	}
	merged := filepath.Join(dirs, "merged")
	check(t, unix.Mount("overlay", merged, "overlay", 0, fmt.Sprintf("lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work", dirs, dirs, dirs)))
	t.Cleanup(func() { check(t, unix.Unmount(merged, unix.MNT_DETACH)) })
	if found := look("", "--root", merged); !finds(found, "root", "is on an overlay") {
		t.Errorf("root on an overlay: %v", found)
	}
	if _, err := os.Stat("/run/systemd/system"); err == nil {
		return // the driver systemd is right here
	}
	if found := look("cgroup_driver = 'systemd'\n"); !finds(found, "configuration", "systemd does not run here") {
		t.Errorf("the driver systemd without systemd: %v", found)
	}
}

// A mistake in a drop-in keeps nobody from looking at the node, and is named with file
// and line; the daemon runs on, warns of what it does not know, and refuses the rest.
func TestDiagnosticsWithABrokenConfiguration(t *testing.T) {
	n := newNode(t, harness.Config("sockt = 'a key of another build'\n"))
	n.RunPod(n.PodConfig("web"))
	if log := n.Log(); !strings.Contains(log, "level=WARN") || !strings.Contains(log, "sockt") {
		t.Errorf("the daemon does not warn of the unknown key:\n%s", log)
	}
	dir := filepath.Join(n.Dir, "config.toml.d")
	check(t, os.Mkdir(dir, 0o755))
	broken := filepath.Join(dir, "10.toml")
	check(t, os.WriteFile(broken, []byte("\npids_limit = 'many'\n"), 0o600))
	check(t, os.WriteFile(filepath.Join(dir, "20.toml"), []byte("\nshm_size = 1\n"), 0o600))
	bundle := filepath.Join(t.TempDir(), "bundle.tar.gz")
	for _, words := range [][]string{{"pods"}, {"timeline"}, {"image", "ls"}, {"debug", "bundle", bundle}} {
		if output, err := n.RunCommand(words[0], words[1:]...); err != nil || words[0] != "image" && words[0] != "debug" && !strings.Contains(output, "test/web") {
			t.Errorf("minicri %v: %v, %s", words, err, output)
		}
	}
	if found, _ := problems(t, n); len(found) != 2 || !finds(found, "configuration", broken+":2:") || !finds(found, "configuration", "20.toml:2: shm_size") {
		t.Errorf("problems: %v", found)
	}
	if _, err := n.RunCommand("check", "--fix"); err == nil {
		t.Error("check --fix works with half of a configuration")
	}
	if output, err := n.RunDaemon(); err == nil || !strings.Contains(output, broken+":2:") || !strings.Contains(output, "shm_size") || strings.Count(strings.TrimSpace(output), "\n") > 0 {
		t.Errorf("a start: %v, %s", err, output)
	}
}
