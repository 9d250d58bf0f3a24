package e2e

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/vishvananda/netlink"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	nodecheck "github.com/minicri/minicri/internal/doctor"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// problems runs `minicri check` and returns what it calls a problem.
func problems(t *testing.T, n *nodetest.Node, flags ...string) (found []nodecheck.Finding, clean bool) {
	t.Helper()
	output, err := n.RunCommand("check", append(flags, "--json")...)
	_, exited := err.(*exec.ExitError)
	harness.Need(t, err == nil || exited, "%v", err)
	var findings []nodecheck.Finding
	jsonErr := json.Unmarshal([]byte(output), &findings)
	harness.Need(t, jsonErr == nil, "%v in\n%s", jsonErr, output)
	for _, f := range findings {
		if f.Grade == nodecheck.Problem {
			found = append(found, f)
		}
	}
	return found, err == nil
}

// wantClean fails the test unless a check finds no problem.
func wantClean(t *testing.T, n *nodetest.Node, flags ...string) {
	found, clean := problems(t, n, flags...)
	harness.Want(t, clean, "check %v: %v", flags, found)
}

// cgroupDir is the directory of a cgroup, in one hierarchy of version 1 or in version 2 alone.
func cgroupDir(path string) string {
	if cgroup.Unified() {
		return filepath.Join("/sys/fs/cgroup", path)
	}
	return filepath.Join("/sys/fs/cgroup/pids", path)
}

// sleeping makes a cgroup of that name, as the driver makes those of containers, with a process in it.
func sleeping(ctx context.Context, t *testing.T, n *nodetest.Node, name string) (path string, process *exec.Cmd) {
	if harness.CgroupDriver() == "systemd" {
		path = filepath.Join(n.CgroupParent, name+".scope")
		process = exec.CommandContext(ctx, "systemd-run", "--quiet", "--scope", "--slice", filepath.Base(n.CgroupParent), "--unit", name, "sleep", "600")
		check(t, process.Start())
		harness.Eventually(t, "systemd makes "+path, func() bool {
			_, err := os.Lstat(cgroupDir(path))
			return err == nil
		})
		return path, process
	}
	path, process = n.MakeCgroup(name), exec.CommandContext(ctx, "sleep", "600")
	check(t, process.Start())
	check(t, os.WriteFile(filepath.Join(cgroupDir(path), "cgroup.procs"), []byte(strconv.Itoa(process.Process.Pid)), 0))
	return path, process
}

// What pods and containers leave is seen and removed: namespaces, files, cgroups with what runs in them,
// mounts, volumes; and nothing of another node.
func TestCheckFindsAndRemovesOrphans(t *testing.T) {
	n := newNode(t)
	id := n.RunPod(n.PodConfig("web"))
	mark := strings.TrimSuffix(filepath.Base(verbose(t, n, id).NetNamespace), id)
	node := strings.TrimSuffix(strings.TrimPrefix(mark, "minicri-"), "-")
	name := strings.Repeat("ab", 32)
	ctx := harness.Limited(t)
	group, process := sleeping(ctx, t, n, "minicri-c-"+node+"-"+name)
	pause, other := sleeping(ctx, t, n, mark+"4567")
	foreign, stranger := sleeping(ctx, t, n, "minicri-c-00000000-"+name)
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

	found, clean := problems(t, n)
	harness.Want(t, !clean && len(found) == 6, "want the 6 orphans, got %v, clean %v", found, clean)
	wantClean(t, n, "--fix")
	for _, path := range append(left, orphan, cgroupDir(group), cgroupDir(pause)) {
		_, err := os.Lstat(path)
		harness.Want(t, err != nil, "%s is still there", path)
	}
	_, _ = process.Wait(), other.Wait()
	harness.Want(t, ctx.Err() == nil, "a process runs on")
	_, err := os.Lstat(cgroupDir(foreign))
	harness.Want(t, err == nil, "the cgroup of another node was removed: %v", err)
	check(t, stranger.Process.Kill())
	_ = stranger.Wait()
	check(t, os.Remove(notOurs))
	wantClean(t, n)
	harness.Want(t, ready(t, n, id), "the pod is not ready")
}

// What is left of a pod and its container whose records were removed by hand is found and removed, without a
// daemon too.
func TestCheckRemovesWhatHasNoRecord(t *testing.T) {
	n := newNode(t)
	n.ImportBusybox()
	config := n.PodConfig("web", nodetest.HostNetwork())
	pod := n.RunPod(config)
	id, err := n.CreateContainer(pod, config, nodetest.Container("app", "true"))
	check(t, err)
	n.Stop()
	for _, record := range []string{filepath.Join("containers", id), filepath.Join("sandboxes", pod)} {
		check(t, os.Remove(filepath.Join(n.Root, record+".json")))
	}
	found, _ := problems(t, n)
	wantFound(t, found, "leak", filepath.Join(n.Root, "container-facts", id+".json"), filepath.Join(n.State, "facts", pod+".json"))
	for _, flags := range [][]string{{"--fix"}, nil} {
		wantClean(t, n, flags...)
	}
	n.Start()
}

// A record that cannot be decoded is shown until an administrator repairs it, which --fix notices, or gives
// it up with --force, which removes what it describes at the next start; --force alone is refused. What is in
// quarantine is no orphan where that cannot be read: the daemon does not start, and --fix removes nothing. A copy
// of a record, or of another node's, is not put back, and goes with --force alone; its pod stays.
func TestCheckForcesWhatIsInQuarantine(t *testing.T) {
	n := newNode(t)
	mended, givenUp := n.RunPod(n.PodConfig("mended")), n.RunPod(n.PodConfig("given-up"))
	pid, dir := pausePID(t, n, mended), filepath.Join(n.Root, "sandboxes")
	whole := harness.Read(t, filepath.Join(dir, mended+".json"))
	n.Kill()
	for _, id := range []string{mended, givenUp} {
		check(t, os.WriteFile(filepath.Join(dir, id+".json"), []byte("nonsense"), 0o600))
	}
	n.Start()
	quarantined := func(want int) (files []string) {
		files, err := filepath.Glob(filepath.Join(dir, "quarantine", "*"))
		harness.Need(t, err == nil && len(files) == want, "in quarantine: %v, %v", files, err)
		return files
	}
	quarantined(2)
	says := func(fails bool, text string, flags ...string) (output string) {
		output, err := n.RunCommand("check", flags...)
		harness.Want(t, (err != nil) == fails && strings.Contains(output, text), "check %v: %v\n%s", flags, err, output)
		return output
	}
	harness.Same(t, "records that cannot be decoded", strings.Count(says(true, ""), "cannot be decoded"), 2)
	says(true, "", "--force")

	n.Kill()
	away := filepath.Join(dir, "quarantine")
	check(t, os.Rename(away, away+".away"))
	check(t, os.Symlink("quarantine", away)) // ELOOP
	harness.WantError(t, n.TryStart())
	harness.Want(t, strings.Contains(n.Log(), "quarantine"), "the daemon does not say why it ends")
	says(true, "quarantine", "--fix")
	harness.Want(t, alive(pid) && len(addresses(t, n)) == 2, "pause lives: %v, addresses %v", alive(pid), addresses(t, n))
	check(t, os.Remove(away))
	check(t, os.Rename(away+".away", away))
	n.Start()

	for _, file := range quarantined(2) {
		if strings.Contains(file, mended) {
			check(t, os.WriteFile(file, whole, 0o600))
		}
	}
	says(true, "not fixed", "--fix")
	harness.Want(t, strings.Contains(quarantined(1)[0], givenUp), "the wrong one is in quarantine after --fix")
	copies := []string{filepath.Join(dir, "backup.json"), filepath.Join(n.Root, "attachments", "backup.json"), filepath.Join(n.Root, "attachments", "other.json")}
	for i, path := range copies {
		content := string(harness.Read(t, filepath.Join(filepath.Dir(path), mended+".json")))
		if i == 2 {
			content = strings.ReplaceAll(strings.ReplaceAll(content, mended, "other"), "minicri-cni-", "minicri-cni-x-")
		}
		check(t, os.WriteFile(path, []byte(content), 0o600))
	}
	n.Restart()
	harness.Same(t, "copies that are put back", strings.Count(says(true, "", "--fix"), "not fixed: it is the record of "), 3)
	says(false, "given up", "--fix", "--force")
	n.Restart()
	wantPods(t, n, mended)
	harness.Want(t, ready(t, n, mended), "the pod whose record was mended is not ready")
	harness.Eventually(t, "what was given up is removed", func() bool { return len(harness.Glob(t, n.Netns, "*"+givenUp)) == 0 })
	for _, path := range copies {
		for _, path := range []string{path, filepath.Join(filepath.Dir(path), "quarantine", filepath.Base(path))} {
			_, err := os.Lstat(path)
			harness.Want(t, errors.Is(err, fs.ErrNotExist), "%s is still there", path)
		}
	}
}

// wantFound fails the test unless a problem of that subject has each of the texts in its message.
func wantFound(t *testing.T, found []nodecheck.Finding, subject string, texts ...string) {
	for _, text := range texts {
		has := func(f nodecheck.Finding) bool { return f.Subject == subject && strings.Contains(f.Message, text) }
		harness.Want(t, slices.ContainsFunc(found, has), "want a problem of %s with %q, found: %v", subject, text, found)
	}
}

// What the daemon says of itself is what a check says of the node, and a network that names a plugin or an
// IPAM plugin that is not there is a problem, the embedded one too.
func TestCheckIsRedWherePodsFail(t *testing.T) {
	n := newDefaultNode(t, "10.88.0.0/16", ownBridge)
	wantClean(t, n, "--pod")
	wantPods(t, n)
	pod := n.RunPod(n.PodConfig("web"))
	n.RunInNetns(func() error {
		links, err := netlink.LinkList()
		for _, link := range links {
			err = errors.Join(err, netlink.LinkSetNoMaster(link)) // as when its bridge has been made anew
		}
		return err
	})
	empty := filepath.Join(n.Root, "containers")
	check(t, os.Remove(empty))
	found, _ := problems(t, n)
	check(t, os.Mkdir(empty, 0o700))
	wantFound(t, found, "sandbox", pod[:12]+") has no network: its link")
	wantFound(t, found, "daemon", empty+" was removed")
	check(t, unix.Kill(n.PID(), unix.SIGUSR1))
	harness.Eventually(t, "the pod that is off its bridge is found", func() bool { return len(nodetest.Info[[]any](t, n, "driftedAttachments")) == 1 })
	found, _ = problems(t, n)
	wantFound(t, found, "attachment", pod[:12]+") is not as ADD left it")
	rename := func(from, to string) error {
		link, err := netlink.LinkByName(from)
		if err == nil {
			err = errors.Join(netlink.LinkSetDown(link), netlink.LinkSetName(link, to), netlink.LinkSetUp(link))
		}
		return err
	}
	n.RunInNetns(func() error { return rename(n.Bridge, "another") })
	found, _ = problems(t, n)
	n.RunInNetns(func() error { return rename("another", n.Bridge) })
	wantFound(t, found, "sandbox", pod[:12]+") has no network: the bridge "+n.Bridge)
	found, _ = problems(t, n, "--cni-bin-dir", t.TempDir())
	wantFound(t, found, "network", "host-local", "bridge")
	bridge := n.BridgePlugin()
	bridge["ipam"] = nodetest.Object{"type": "not-installed"}
	n.WriteConflist("20-ipam.conflist", bridge)
	found, _ = problems(t, n)
	wantFound(t, found, "network", "not-installed")
	broken := filepath.Join(n.CNIConf, "99-broken.conflist")
	check(t, os.WriteFile(broken, []byte("{\n \"name\": \"x\",\n oops\n}"), 0o644))
	found, _ = problems(t, n)
	wantFound(t, found, "network", broken+": line 3")
	n.WriteConflist("10-first.conflist", nodetest.Object{"type": "missing"})
	harness.Eventually(t, "the daemon sees the file", func() bool { is, said := networkReady(t, n); return !is && strings.Contains(said, "missing") })
	found, clean := problems(t, n)
	harness.Want(t, !clean, "a network that is not ready is no problem")
	wantFound(t, found, "NetworkReady", "missing")
	wantFound(t, found, "network", "missing")
}

// A check without a daemon names what no daemon could run pods with.
func TestCheckBeforeTheFirstStart(t *testing.T) {
	n := newNode(t)
	config := filepath.Join(t.TempDir(), "config.toml")
	look := func(toml string, flags ...string) []nodecheck.Finding {
		check(t, os.WriteFile(config, []byte(toml), 0o600))
		found, clean := problems(t, n, append([]string{"--config", config, "--socket", filepath.Join(t.TempDir(), "none")}, flags...)...)
		harness.Want(t, !clean, "%s %v: no problem", toml, flags)
		return found
	}
	wantFound(t, look("[streaming]\ntls_cert = '/nowhere/cert.pem'\ntls_key = '/nowhere/key.pem'\n"), "configuration", "/nowhere/cert.pem")
	cert, key := filepath.Join(t.TempDir(), "cert.pem"), filepath.Join(t.TempDir(), "key.pem")
	nodetest.Certificate(t, cert, key, -time.Minute)
	check(t, os.WriteFile(config, fmt.Appendf(nil, "metrics_tls_cert = %q\nmetrics_tls_key = %q\n", cert, key), 0o600))
	output, err := n.RunCommand("check", "--config", config)
	harness.Want(t, err == nil && strings.Contains(output, cert+" has expired"), "check: %v, %s", err, output)
	wantFound(t, look("", "--pod"), "pod", "no daemon serves")
	dirs := t.TempDir()
	check(t, unix.Mount("small", dirs, "tmpfs", 0, "size=1m,nr_inodes=64"))
	t.Cleanup(func() { check(t, unix.Unmount(dirs, unix.MNT_DETACH)) })
	wantFound(t, look("", "--root", filepath.Join(dirs, "new", "root")), "root", "are free in the file system of "+dirs, "inodes")
	for _, dir := range []string{"lower", "upper", "work", "merged"} {
		check(t, os.Mkdir(filepath.Join(dirs, dir), 0o755))
	}
	merged := filepath.Join(dirs, "merged")
	check(t, unix.Mount("overlay", merged, "overlay", 0, fmt.Sprintf("lowerdir=%s/lower,upperdir=%s/upper,workdir=%s/work", dirs, dirs, dirs)))
	t.Cleanup(func() { check(t, unix.Unmount(merged, unix.MNT_DETACH)) })
	wantFound(t, look("", "--root", merged), "root", "is on an overlay")
	frozen, noexec := t.TempDir(), t.TempDir()
	for dir, flags := range harness.Sorted(map[string]uintptr{frozen: unix.MS_RDONLY, noexec: unix.MS_NOEXEC}) {
		check(t, unix.Mount("test", dir, "tmpfs", flags, ""))
		t.Cleanup(func() { check(t, unix.Unmount(dir, 0)) })
	}
	wantFound(t, look("", "--root", filepath.Join(noexec, "new")), "configuration", "root: "+noexec+" is mounted noexec")
	wantFound(t, look("", "--root", frozen), "root", "is mounted read-only")
	wantFound(t, look("", "--state", frozen), "state", "is mounted read-only")
	if _, err := os.Stat("/run/systemd/system"); err == nil {
		return // the driver systemd is right here
	}
	wantFound(t, look("cgroup_driver = 'systemd'\n"), "configuration", "systemd does not run here")
}

// A mistake in a drop-in keeps nobody from looking at the node, and is named with file and line; the daemon
// runs on, warns of what it does not know, and refuses the rest.
func TestDiagnosticsWithABrokenConfiguration(t *testing.T) {
	n := newNode(t, nodetest.Config("sockt = 'a key of another build'\n"))
	n.RunPod(n.PodConfig("web"))
	harness.Want(t, strings.Contains(n.Log(), "level=WARN") && strings.Contains(n.Log(), "sockt"), "no warning of the unknown key:\n%s", n.Log())
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
	found, _ := problems(t, n)
	harness.Same(t, "problems", len(found), 2)
	wantFound(t, found, "configuration", broken+":2:", "20.toml:2: shm_size")
	_, err := n.RunCommand("check", "--fix")
	harness.WantError(t, err) // with half of a configuration
	if output, err := n.RunDaemon(); err == nil || !strings.Contains(output, broken+":2:") || !strings.Contains(output, "shm_size") || strings.Count(strings.TrimSpace(output), "\n") > 0 {
		t.Errorf("a start: %v, %s", err, output)
	}
}
