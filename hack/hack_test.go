// Package hack holds no Go code of its own: these tests check the set-up's
// scripts and lists.
package hack

import (
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"strings"
	"testing"
)

// moduleHosts are the hosts that the set-up may name: those of Go import
// paths, and the project's own page. Image registries and module proxies are
// the business of the machine's configuration, never of the set-up.
var moduleHosts = map[string]bool{
	"github.com":          true,
	"golang.org":          true,
	"google.golang.org":   true,
	"honnef.co":           true,
	"mvdan.cc":            true,
	"gopkg.in":            true,
	"go.uber.org":         true,
	"sigs.k8s.io":         true,
	"k8s.io":              true,
	"cel.dev":             true,
	"cyphar.com":          true,
	"go.etcd.io":          true,
	"go.opentelemetry.io": true,
	"go.yaml.in":          true,
	"gonum.org":           true,
}

// host matches a host name that a path follows: the form of registry hosts,
// image references and import paths alike.
var host = regexp.MustCompile(`(?:[a-z0-9-]+\.)+[a-z]{2,}(?::[0-9]+)?/`)

func TestSetUpNamesNoRegistry(t *testing.T) {
	files := []string{"../Makefile", "../.ci/run"}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err == nil && d.Type().IsRegular() && path != "hack_test.go" {
			files = append(files, path)
		}
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	for _, file := range files {
		for _, name := range foreignHosts(read(t, file)) {
			t.Errorf("%s names the host %s", file, name)
		}
	}
}

func TestForeignHostsAreFound(t *testing.T) {
	for _, text := range []string{"image = registry.example.org/pause:3.10", "pull x.example.com:5000/a"} {
		if len(foreignHosts(text)) != 1 {
			t.Errorf("no host found in %q", text)
		}
	}
}

func foreignHosts(text string) []string {
	var foreign []string
	for _, match := range host.FindAllString(text, -1) {
		if name := strings.TrimSuffix(match, "/"); !moduleHosts[name] {
			foreign = append(foreign, name)
		}
	}
	return foreign
}

func TestEveryPackageSaysWhy(t *testing.T) {
	for _, list := range []string{"packages.txt", "vm/packages.txt", "vm/guest/packages.txt"} {
		for line := range strings.Lines(read(t, list)) {
			if strings.HasPrefix(line, "#") {
				continue
			}
			if len(strings.Fields(line)) < 3 {
				t.Errorf("%s: %q does not say why", list, strings.TrimSpace(line))
			}
		}
	}
}

func TestScriptsParse(t *testing.T) {
	for _, script := range []string{"setup", "in-netns", "test", "unpack", "vm/root", "vm/payload", "vm/run", "vm/guest/suite"} {
		if out, err := exec.Command("sh", "-n", script).CombinedOutput(); err != nil {
			t.Errorf("%s: %v: %s", script, err, out)
		}
	}
}

// in-netns has to hide the machine's links and keep its cgroups.
func TestInNetns(t *testing.T) {
	if os.Getuid() != 0 {
		t.Fatal("needs root: in-netns makes namespaces")
	}
	const inside = `ip -brief link | wc -l; ip -brief address show lo | cut -d' ' -f1
		ip link add hack-test type bridge && mkdir "$1" && mount -t tmpfs hack-test "$1"
		ls -d /sys/fs/cgroup/*/cgroup.procs /sys/fs/cgroup/cgroup.procs 2>/dev/null | head -n 1`
	dir := filepath.Join(t.TempDir(), "mount")
	out, err := exec.Command("./in-netns", "sh", "-euc", inside, "sh", dir).CombinedOutput()
	if err != nil {
		t.Fatalf("in-netns: %v: %s", err, out)
	}
	lines := strings.Split(strings.TrimSpace(string(out)), "\n")
	if len(lines) != 3 || lines[0] != "1" || lines[1] != "lo" {
		t.Errorf("want one link, lo, and a cgroup, got %q", lines)
	}
	if strings.Contains(read(t, "/proc/self/mountinfo"), dir) {
		t.Errorf("a mount made inside reached the machine: %s", dir)
	}
	if err := exec.Command("ip", "link", "show", "hack-test").Run(); err == nil {
		t.Error("a link made inside reached the machine")
	}
}

func read(t *testing.T, path string) string {
	t.Helper()
	data, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	return string(data)
}
