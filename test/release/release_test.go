// Package release tests what make release has made: that a machine that has only Debian can use it, with pods running
// over an upgrade and a removal, and that another build makes the same bytes. make test-release runs it on a
// throw-away copy of this machine's files, which hack/release/machine makes.
package release

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"syscall"
	"testing"
	"time"

	"google.golang.org/grpc"
	"google.golang.org/grpc/credentials/insecure"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/test/harness"
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
			if says := run(t, "file", filepath.Join(dir, program)); !strings.Contains(says, machine) || !strings.Contains(says, "statically linked") {
				t.Errorf("%s of %s: %s", program, arch, says)
			}
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
	ctx, cancel := context.WithTimeout(t.Context(), 2*time.Minute)
	defer cancel()
	_, err = client.Version(ctx, &runtimeapi.VersionRequest{}, grpc.WaitForReady(true))
	check(t, err)
	return client
}

func pausePID(t *testing.T, client runtimeapi.RuntimeServiceClient, id string) int {
	answer := harness.Call(t, client.PodSandboxStatus, &runtimeapi.PodSandboxStatusRequest{PodSandboxId: id, Verbose: true})
	harness.Same(t, "state of the pod", answer.Status.GetState(), runtimeapi.PodSandboxState_SANDBOX_READY)
	var info struct {
		PID int `json:"pid"`
	}
	err := json.Unmarshal([]byte(answer.Info["info"]), &info)
	harness.Need(t, err == nil && info.PID != 0, "the pod's process: %v: %s", err, fmt.Sprint(answer.Info))
	return info.PID
}
