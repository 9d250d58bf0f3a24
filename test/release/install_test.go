package release

import (
	"encoding/json"
	"errors"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
)

const nobody = 65534

// make install needs nothing but a place that its user may write: no root, no network,
// which is not here, no compiler. What uninstall does not take back it names.
func TestMakeInstall(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{filepath.Dir(dir), dir} {
		check(t, os.Chmod(path, 0o755))
	}
	tree, programs, target := dir+"/tree", dir+"/programs", dir+"/target"
	for _, path := range []string{tree + "/bin", programs, target} {
		check(t, os.MkdirAll(path, 0o755))
	}
	check(t, os.Chown(target, nobody, nobody))
	run(t, "sh", "-c", "cd ../.. && cp -R Makefile VERSION LICENSE *.md NOTICE hack docs "+tree+" && cp -R --parents test/results "+tree+" && cp -R bin/minicri bin/minicri-shim bin/cni bin/share "+tree+"/bin")
	for _, name := range []string{"make", "sh", "install", "sed", "ls", "cat", "echo", "rm", "rmdir", "grep", "cmp", "dirname"} {
		path, err := exec.LookPath(name)
		check(t, err)
		check(t, os.Symlink(path, programs+"/"+name))
	}
	unprivileged := func(verb string) string {
		command := exec.Command(programs+"/make", "-s", "-C", tree, verb, "DESTDIR="+target)
		command.Env = []string{"PATH=" + programs}
		command.SysProcAttr = &syscall.SysProcAttr{Credential: &syscall.Credential{Uid: nobody, Gid: nobody}}
		out, err := command.CombinedOutput()
		harness.Need(t, err == nil, "make %s: %v: %s", verb, err, out)
		return string(out)
	}

	unprivileged("install")
	all := installed(t, target)
	for _, path := range []string{
		"/usr/local/bin/minicri", "/usr/local/bin/minicri-shim", "/usr/local/lib/minicri/cni/bridge", "/usr/local/lib/systemd/system/minicri.service",
		"/usr/local/share/man/man8/minicri.8", "/usr/local/share/doc/minicri/docs/quickstart.md", "/usr/local/share/doc/minicri/grafana.json", "/usr/local/share/doc/minicri/alerts.yml", "/usr/local/share/doc/minicri/test/results/bench-um.md",
		"/etc/minicri/config.toml", "/etc/crictl.yaml",
	} {
		harness.Want(t, slices.Contains(all, path), "make install: there is no %s", path)
	}
	harness.Same(t, "what make uninstall says", unprivileged("uninstall"), "")
	harness.Same(t, "what make uninstall leaves", installed(t, target), nil)

	unprivileged("install")
	check(t, os.WriteFile(target+"/etc/minicri/config.toml", []byte("log_level = \"debug\"\n"), 0o644))
	says := unprivileged("uninstall")
	harness.Want(t, strings.Contains(says, "left where it is: "+target+"/etc/minicri\n"), "make uninstall says %q", says)
	harness.Same(t, "what make uninstall leaves", installed(t, target), []string{"/etc/minicri/config.toml"})
}

// installed are the files below a directory.
func installed(t *testing.T, root string) (paths []string) {
	check(t, filepath.WalkDir(root, func(path string, entry fs.DirEntry, err error) error {
		if err == nil && !entry.IsDir() {
			paths = append(paths, strings.TrimPrefix(path, root))
		}
		return err
	}))
	return paths
}

// The .rpm has what the .deb has, and rpm installs and removes it.
func TestRPM(t *testing.T) {
	rpm, root := file(t, "amd64.rpm"), t.TempDir()
	run(t, "dpkg", "-x", file(t, "amd64.deb"), root)
	run(t, "sh", "-c", "mkdir '"+root+"/rpm' && rpm2cpio '"+absolute(t, rpm)+"' | (cd '"+root+"/rpm' && busybox cpio -idm) 2>&1")
	run(t, "mv", root+"/usr/share/zsh/vendor-completions", root+"/usr/share/zsh/site-functions") // Debian's zsh has another directory
	run(t, "diff", "-r", root+"/usr", root+"/rpm/usr")
	run(t, "diff", "-r", root+"/etc", root+"/rpm/etc")
	list := run(t, "rpm", "-qpl", rpm)
	harness.Want(t, strings.Contains(list, "/usr/bin/minicri\n") && strings.Contains(list, "/etc/minicri/config.toml\n"), "rpm -qpl: %s", list)
	harness.Same(t, "machine that the .rpm says it was made on", run(t, "rpm", "-qp", "--qf", "%{BUILDHOST}", rpm), "minicri")

	// Of Debian: nothing here provides what rpm asks for.
	run(t, "rpm", "--install", "--nodeps", rpm)
	run(t, "rpm", "--verify", "--nodeps", "minicri")
	run(t, "minicri", "config", "check", "/etc/minicri/config.toml")
	_, err := os.Stat("/etc/crictl.yaml")
	check(t, err)
	run(t, "rpm", "--erase", "--nodeps", "minicri")
	for _, path := range []string{"/usr/bin/minicri", "/usr/lib/minicri", "/etc/crictl.yaml", "/etc/minicri/config.toml"} {
		_, err := os.Stat(path)
		harness.Want(t, err != nil, "rpm --erase: %s is there", path)
	}
}

// blocks are the commands of a page that its tests run: its blocks of sh.
func blocks(t *testing.T, page string) (scripts []string) {
	for _, found := range regexp.MustCompile("(?s)```sh\n(.*?)```").FindAllStringSubmatch(string(harness.Read(t, "../../docs/"+page)), -1) {
		scripts = append(scripts, found[1])
	}
	return scripts
}

// script runs a block of a page in a directory.
func script(t *testing.T, dir, text string) {
	command := exec.Command("sh", "-eux", "-c", text)
	command.Dir = dir
	command.Stdout, command.Stderr = os.Stdout, os.Stdout
	err := command.Run()
	harness.Need(t, err == nil, "%v: %s", err, text)
}

func absolute(t *testing.T, path string) string {
	path, err := filepath.Abs(path)
	check(t, err)
	return path
}

// TestQuickstart runs the page from the files of the release to a node that is fit. What
// systemd does there, starting the daemon, the test does; TestReadyNode goes on.
func TestQuickstart(t *testing.T) {
	all := blocks(t, "quickstart.md")
	harness.Need(t, len(all) >= 3, "the page has %d blocks of sh", len(all))
	script(t, files, all[0])
	defer run(t, "dpkg", "--purge", "minicri")
	defer os.RemoveAll("/etc/minicri")
	stop := serve(t)
	defer stop()
	connect(t)
	for _, text := range all[1:3] {
		script(t, files, text)
	}
}

// TestFromContainerd runs the page's conversion of what Debian's containerd is told.
func TestFromContainerd(t *testing.T) {
	t.Setenv("PATH", absolute(t, "../../bin/debian/usr/bin")+":"+os.Getenv("PATH"))
	run(t, "dpkg", "-i", file(t, "amd64.deb"))
	defer run(t, "dpkg", "--purge", "minicri")
	defer os.RemoveAll("/etc/minicri")
	check(t, os.MkdirAll("/etc/containerd", 0o755))
	check(t, os.WriteFile("/etc/containerd/config.toml", []byte("version = 2\n[plugins.'io.containerd.grpc.v1.cri']\nmax_concurrent_downloads = 9\n"), 0o644))
	for _, text := range blocks(t, "from-containerd.md") {
		script(t, t.TempDir(), text)
	}
	made := harness.Read(t, "/etc/minicri/config.toml.d/10-containerd.toml")
	harness.Want(t, regexp.MustCompile(`(?m)^max_downloads = 9$`).Match(made), "the file is\n%s", made)
}

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
