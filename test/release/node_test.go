//go:build vm

package release

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

const offered = "../../bin/release/node" // by cluster offer

// TestReadyNode goes by docs/quickstart.md alone from the files of the release to a node that is
// Ready, runs a pod there, and goes away from it. The machine is given what the page takes for granted: an
// address, Kubernetes' programs and, for want of a registry, its images.
func TestReadyNode(t *testing.T) {
	dir := t.TempDir()
	for _, path := range []string{file(t, "amd64.deb"), file(t, "amd64.tar.gz"), files + "/SHA256SUMS"} {
		run(t, "cp", path, dir)
	}
	giveNetwork(t)
	giveKubernetes(t)
	t.Setenv("KUBECONFIG", "/etc/kubernetes/admin.conf")
	t.Cleanup(func() { showFailure(t) })
	for _, text := range blocks(t, "quickstart.md") {
		switch {
		case strings.Contains(text, "kubeadm init"):
			giveImages(t)
		case strings.Contains(text, "kubeadm reset"):
			runsAPod(t)
		case strings.Contains(text, "tar -C"):
			_, err := os.Stat("/usr/bin/minicri")
			harness.Want(t, err != nil, "dpkg --remove has left /usr/bin/minicri")
		}
		script(t, dir, text)
	}
}

func giveNetwork(t *testing.T) {
	run(t, "ip", "link", "add", "eth0", "type", "dummy")
	run(t, "ip", "address", "add", "192.0.2.10/24", "dev", "eth0")
	run(t, "ip", "link", "set", "eth0", "up")
	run(t, "ip", "route", "add", "default", "via", "192.0.2.1")
	check(t, os.WriteFile("/etc/resolv.conf", []byte("nameserver 192.0.2.53\n"), 0o644))
}

// giveKubernetes installs what Kubernetes' packages have.
func giveKubernetes(t *testing.T) {
	for _, name := range []string{"kubelet", "kubeadm", "kubectl"} {
		run(t, "install", "-m", "0755", offered+"/"+name, "/usr/bin")
	}
	run(t, "cp", "../../hack/release/kubelet.service", "/etc/systemd/system")
	run(t, "systemctl", "daemon-reload")
	run(t, "systemctl", "enable", "kubelet")
}

// giveImages imports the images, by the names that kubeadm wants.
func giveImages(t *testing.T) {
	for _, archive := range harness.Glob(t, offered+"/*.tar") {
		run(t, "minicri", "image", "import", archive)
	}
	wanted := run(t, "kubeadm", "config", "images", "list", "--kubernetes-version", strings.TrimSpace(run(t, "kubeadm", "version", "-o", "short")))
	for name := range strings.FieldsSeq(wanted) {
		short, _, _ := strings.Cut(filepath.Base(name), ":")
		found, err := filepath.Glob(offered + "/" + short + "-*.tar")
		harness.Need(t, err == nil && len(found) == 1, "%s: %v: %v", name, found, err)
		tag := strings.TrimPrefix(filepath.Base(found[0]), short+"-")
		tag = tag[:strings.LastIndex(tag, "-")]
		run(t, "minicri", "image", "tag", "cluster.minicri.test/"+short+":"+tag, name)
	}
}

// runsAPod asks of the node what it is for.
func runsAPod(t *testing.T) {
	const image = "cluster.minicri.test/tools:minicri"
	run(t, "kubectl", "wait", "--for=create", "serviceaccount/default", "--timeout=10m") // by a controller, some time after the node
	run(t, "kubectl", "run", "web", "--image", image, "--image-pull-policy", "Never", "--command", "--", "httpd", "-f", "-p", "8080")
	run(t, "kubectl", "wait", "--for=condition=Ready", "pod/web", "--timeout=10m")
	harness.Same(t, "hostname in the pod", run(t, "kubectl", "exec", "web", "--", "hostname"), "web\n")
}

func showFailure(t *testing.T) {
	if !t.Failed() {
		return
	}
	for _, command := range []string{
		"minicri pods --wide", "minicri timeline --failed", "kubectl get pods -A -o wide --request-timeout=10s",
		"journalctl --no-pager -n 60 -u kubelet", "journalctl --no-pager -n 60 -u minicri",
	} {
		out, err := exec.Command("sh", "-c", command).CombinedOutput()
		t.Logf("%s: %v\n%s", command, err, out)
	}
}
