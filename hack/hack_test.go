// Package hack holds no Go code of its own: these tests check the set-up's
// scripts and lists.
package hack

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
)

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
