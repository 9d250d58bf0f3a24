package machine

import (
	"os"
	"testing"
)

// Directories that the node needs are never relabelled, whatever their spelling,
// and what is below them may be.
func TestCheckRelabel(t *testing.T) {
	for _, path := range []string{"/", "//", "/etc", "/etc/", "/usr", "/usr/.", "/var/../etc", "/var/lib"} {
		if CheckRelabel(path) == nil {
			t.Errorf("%s may be relabelled", path)
		}
		if (Machine{SELinux: true}).Relabel(path, "system_u:object_r:container_file_t:s0", false) == nil {
			t.Errorf("%s has been relabelled", path)
		}
	}
	for _, path := range []string{"/etc/app", "/var/lib/kubelet/pods/1/volumes/x", "/data"} {
		if err := CheckRelabel(path); err != nil {
			t.Error(err)
		}
	}
}

// Without SELinux there are no labels, and nothing is relabelled.
func TestWithoutSELinux(t *testing.T) {
	m, err := Read(t.TempDir())
	if err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat("/sys/fs/selinux/enforce"); (err == nil) != m.SELinux {
		t.Errorf("SELinux is %v, but the kernel says %v", m.SELinux, err)
	}
	process, mount, err := Machine{}.NewLabels([]string{"level:s0:c1,c2"})
	if err != nil || process != "" || mount != "" {
		t.Errorf("labels %q and %q, %v", process, mount, err)
	}
	if err := (Machine{}).Relabel(t.TempDir(), "system_u:object_r:container_file_t:s0", false); err != nil {
		t.Error(err)
	}
}
