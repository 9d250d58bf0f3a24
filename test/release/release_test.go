// Package release tests what make release has made: that a machine that has only Debian can use it, with pods running
// over an upgrade and a removal, and that another build makes the same bytes. make test-release runs it on a
// throw-away copy of this machine's files, which hack/release/machine makes.
package release

import (
	"encoding/json"
	"errors"
	"fmt"
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

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

const files = "../../bin/release/files"

var check = harness.Check

// run runs a program and returns what it writes.
func run(t *testing.T, name string, arguments ...string) string {
	out, err := exec.Command(name, arguments...).CombinedOutput()
	harness.Need(t, err == nil, "%s %s: %v: %s", name, strings.Join(arguments, " "), err, out)
	return string(out)
}

// file is the one file of the release whose name ends so.
func file(t *testing.T, suffix string) string {
	found := harness.Glob(t, files+"/minicri-*-linux-"+suffix)
	harness.Need(t, len(found) == 1, "%s: %v: make release makes one", suffix, found)
	return found[0]
}

// Every file is named with its checksum, and every program of the package is in the list of what is linked.
func TestChecksumsAndList(t *testing.T) {
	check := exec.Command("sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS")
	check.Dir = files
	out, err := check.CombinedOutput()
	harness.Want(t, err == nil, "%v: %s", err, out)
	for _, arch := range []string{"amd64", "arm64"} {
		for _, suffix := range []string{".deb", ".rpm", ".tar.gz", ".cdx.json"} {
			sums := run(t, "cat", files+"/SHA256SUMS")
			name := filepath.Base(file(t, arch+suffix))
			harness.Want(t, strings.Contains(sums, name), "SHA256SUMS does not name %s", name)
		}
		var list struct {
			BOMFormat  string `json:"bomFormat"`
			Components []struct{ Name string }
		}
		err := json.Unmarshal([]byte(run(t, "cat", file(t, arch+".cdx.json"))), &list)
		harness.Want(t, err == nil && list.BOMFormat == "CycloneDX", "%s: %v, %s", arch, err, list.BOMFormat)
		names := map[string]bool{}
		for _, c := range list.Components {
			names[c.Name] = true
		}
		for _, name := range []string{"bin/minicri", "bin/minicri-shim", "lib/minicri/cni/bridge", "stdlib", "libseccomp", "google.golang.org/grpc"} {
			harness.Want(t, names[name], "%s: the list does not name %s", arch, name)
		}
	}
}

// What is for arm64 is of arm64, static, down to the helper programs inside.
func TestArchitectures(t *testing.T) {
	for arch, machine := range map[string]string{"amd64": "x86-64", "arm64": "ARM aarch64"} {
		dir := t.TempDir()
		run(t, "tar", "-C", dir, "-xzf", file(t, arch+".tar.gz"))
		for _, program := range []string{"bin/minicri", "bin/minicri-shim", "lib/minicri/cni/bridge"} {
			says := run(t, "file", filepath.Join(dir, program))
			harness.Want(t, strings.Contains(says, machine) && strings.Contains(says, "statically linked"), "%s of %s: %s", program, arch, says)
		}
	}
}

// TestPackage is docs/quickstart.md with dpkg: a daemon of the package runs a pod, which
// an upgrade, a removal and another installation leave alone.
func TestPackage(t *testing.T) {
	deb := file(t, "amd64.deb")
	run(t, "dpkg", "--path-exclude=/usr/share/doc/*", "-i", deb) // as small images of Debian do
	for _, path := range []string{"/usr/bin/minicri", "/usr/lib/systemd/system/minicri.service", "/usr/share/man/man8/minicri.8", "/etc/minicri/config.toml", "/etc/crictl.yaml"} {
		_, err := os.Stat(path)
		check(t, err)
	}
	run(t, "minicri", "config", "check", "/etc/minicri/config.toml")
	const network = "/etc/minicri/config.toml.d/10-network.toml"
	check(t, os.MkdirAll(filepath.Dir(network), 0o755))
	check(t, os.WriteFile(network, []byte("[default_network]\nenabled = true\nsubnet = \"10.99.0.0/16\"\n"), 0o644))

	stop := serve(t)
	pod := runPod(t, "web")
	before := pausePID(t, connect(t), pod)
	same := func(when string) { harness.Same(t, when+": pause", pausePID(t, connect(t), pod), before) }

	stop()
	run(t, "dpkg", "-i", later(t, deb))
	harness.Same(t, "version", run(t, "dpkg-query", "-W", "-f", "${Version}", "minicri"), "99.0.0")
	stop = serve(t)
	same("upgrade")

	stop()
	says := run(t, "dpkg", "--remove", "minicri")
	harness.Want(t, strings.Contains(says, "pods keep running"), "dpkg --remove says %s", says)
	for path, stays := range map[string]bool{"/usr/bin/minicri": false, "/etc/crictl.yaml": false, "/usr/lib/minicri": false, network: true, "/var/lib/minicri": true} {
		_, err := os.Stat(path)
		harness.Want(t, (err == nil) == stays, "dpkg --remove: %s: %v", path, err)
	}
	check(t, syscall.Kill(before, 0))
	run(t, "dpkg", "-i", deb)
	stop = serve(t)
	same("removal")

	removePod(t, pod)
	stop()
	run(t, "dpkg", "--purge", "minicri")
	hierarchies, err := cgroup.FindHierarchies()
	check(t, err)
	harness.Want(t, !hierarchies.Exists("/minicri"), "dpkg --purge left the daemon's cgroup")
}

// TestPackageWithoutStart has a systemd that does nothing it is asked for: dpkg goes on, whoever
// installs is told, and a package that was removed starts as one that is new. Before, systemd does not run, as where
// an image is built: the unit is enabled. A link of crictl's that leads nowhere is left alone.
func TestPackageWithoutStart(t *testing.T) {
	const systemctl, asked = "/usr/local/bin/systemctl", "/run/asked"
	defer os.RemoveAll("/run/systemd")
	check(t, os.Symlink("/nowhere", "/etc/crictl.yaml"))
	defer func() {
		to, err := os.Readlink("/etc/crictl.yaml")
		harness.Want(t, to == "/nowhere", "/etc/crictl.yaml leads to %q, %v", to, err)
		check(t, errors.Join(os.Remove("/etc/crictl.yaml"), os.Remove(systemctl), os.Remove(asked)))
	}()
	check(t, os.WriteFile(systemctl, []byte("#!/bin/sh\necho \"$@\" >>"+asked+"\nexit 1\n"), 0o755))
	deb := file(t, "amd64.deb")
	defer run(t, "dpkg", "--purge", "minicri")
	for i, step := range []struct{ deb, want string }{{deb, "--quiet enable minicri"}, {"", "--quiet disable minicri"}, {deb, "enable --now minicri"}, {later(t, deb), "try-restart minicri"}, {"", "disable --now minicri"}, {deb, "enable --now minicri"}} {
		if check(t, os.WriteFile(asked, nil, 0o600)); i == 2 {
			check(t, os.MkdirAll("/run/systemd/system", 0o755))
		}
		command := []string{"-i", step.deb}
		if step.deb == "" {
			command = []string{"--remove", "minicri"}
		}
		says := run(t, "dpkg", command...)
		got := run(t, "cat", asked)
		harness.Want(t, strings.Contains(got, step.want), "dpkg %v: systemctl was asked for %q, not for %s", command, got, step.want)
		harness.Want(t, strings.Contains(says, "minicri does not start: journalctl -u minicri") == (step.deb != "" && i >= 2), "dpkg %v says %s", command, says)
	}
}

// later is the same package with a later version.
func later(t *testing.T, deb string) string {
	dir := filepath.Join(t.TempDir(), "later")
	run(t, "dpkg-deb", "-R", deb, dir)
	run(t, "sed", "-i", "s/^Version: .*/Version: 99.0.0/", dir+"/DEBIAN/control")
	run(t, "dpkg-deb", "-Znone", "-b", dir, dir+".deb")
	return dir + ".deb"
}

// serve starts the daemon as its unit does, or as another command line does; there is no
// systemd. What ends it waits for its end.
func serve(t *testing.T, command ...string) (stop func()) {
	if len(command) == 0 {
		command = strings.Fields(run(t, "sed", "-n", "s/^ExecStart=//p", "/usr/lib/systemd/system/minicri.service"))
	}
	daemon := exec.Command(command[0], command[1:]...)
	daemon.Stdout, daemon.Stderr = os.Stdout, os.Stderr
	check(t, daemon.Start())
	ended := make(chan error, 1)
	go func() { ended <- daemon.Wait() }()
	return func() {
		check(t, daemon.Process.Signal(syscall.SIGTERM))
		check(t, <-ended)
	}
}

// connect waits until the daemon answers.
func connect(t *testing.T) runtimeapi.RuntimeServiceClient {
	connection, err := grpc.NewClient("unix:///run/minicri/minicri.sock", grpc.WithTransportCredentials(insecure.NewCredentials()))
	check(t, err)
	t.Cleanup(func() { connection.Close() })
	client := runtimeapi.NewRuntimeServiceClient(connection)
	_, err = client.Version(harness.Limited(t), &runtimeapi.VersionRequest{}, grpc.WaitForReady(true))
	check(t, err)
	return client
}

func pausePID(t *testing.T, client runtimeapi.RuntimeServiceClient, id string) int {
	answer := nodetest.Call(t, client.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	harness.Same(t, "state of the pod", answer.Status.GetState(), runtimeapi.PodSandboxState_SANDBOX_READY)
	var info struct {
		PID int `json:"pid"`
	}
	err := json.Unmarshal([]byte(answer.Info["info"]), &info)
	harness.Need(t, err == nil && info.PID != 0, "the pod's process: %v: %s", err, fmt.Sprint(answer.Info))
	return info.PID
}

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
		"/usr/local/bin/minicri", "/usr/local/bin/minicri-shim", "/usr/local/lib/minicri/cni/bridge", "/usr/local/lib/systemd/system/minicri.service", "/usr/local/lib/sysctl.d/60-minicri.conf",
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
var podParent = fmt.Sprintf("/minicri-release-test-%d", time.Now().UnixNano())

func runPod(t *testing.T, name string) string {
	return nodetest.Call(t, connect(t).RunPodSandbox, &runtimeapi.RunPodSandboxRequest{Config: &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: name, Uid: name, Namespace: "test"}, LogDirectory: t.TempDir(),
		Linux: &runtimeapi.LinuxPodSandboxConfig{CgroupParent: podParent},
	}}).PodSandboxId
}

// removePod also removes its parent cgroup, which is a kubelet's.
func removePod(t *testing.T, id string) {
	client := connect(t)
	nodetest.Call(t, client.StopPodSandbox, &runtimeapi.StopPodSandboxRequest{PodSandboxId: id})
	nodetest.Call(t, client.RemovePodSandbox, &runtimeapi.RemovePodSandboxRequest{PodSandboxId: id})
	hierarchies, err := cgroup.FindHierarchies()
	check(t, err)
	check(t, hierarchies.Remove(podParent, time.Minute))
}
