package release

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"syscall"
	"testing"

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
