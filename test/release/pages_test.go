package release

import (
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

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
