package machine

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"runtime"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/capability"
	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/test/harness"
)

func TestCount(t *testing.T) {
	for text, want := range map[string]uint64{"0\n": 1, "0-1\n": 2, "0-3,8-127\n": 128, "": 0, "all": 0} {
		file := filepath.Join(t.TempDir(), "possible")
		harness.Check(t, os.WriteFile(file, []byte(text), 0o600))
		harness.Same(t, text, count(file), want)
	}
	harness.Same(t, "without the file", count("/no/such/file"), 0)
	harness.Same(t, "a kernel without NUMA has memory nodes", memoryNodes("/no/such/file"), 1)
	if m, err := Read(t.TempDir()); err != nil || m.CPUs < uint64(runtime.NumCPU()) || m.MemoryNodes == 0 {
		t.Errorf("this machine has %d CPUs and %d memory nodes: %v", m.CPUs, m.MemoryNodes, err)
	}
}

// What the kernel says of the mounted controllers, and of the capabilities of this process, is what we say. The value
// that pause gets on this machine has to be one that the kernel takes: a real process tries it.
func TestMachineIsWhatTheKernelSays(t *testing.T) {
	machine, err := Read(t.TempDir())
	harness.Check(t, err)
	own, err := cgroups.ParseCgroupFile("/proc/self/cgroup")
	harness.Check(t, err)
	unified, _ := os.ReadFile(unifiedRoot + "/cgroup.controllers")
	for _, controller := range []string{"memory", "cpu", "pids"} {
		_, want := own[controller]
		if machine.CgroupV2 {
			want = slices.Contains(strings.Fields(string(unified)), controller)
		}
		harness.Want(t, slices.Contains(machine.Controllers, controller) == want,
			"%s: want %v, controllers %q", controller, want, machine.Controllers)
	}
	harness.Want(t, !slices.Contains(machine.Controllers, "systemd") && !slices.Contains(machine.Controllers, ""),
		"a hierarchy without a controller is among %q", machine.Controllers)
	for _, name := range machine.Capabilities {
		harness.Want(t, slices.ContainsFunc(capability.ListKnown(), func(c capability.Cap) bool { return "CAP_"+strings.ToUpper(c.String()) == name }),
			"%q is no capability", name)
	}
	harness.Want(t, slices.IsSorted(machine.Capabilities) &&
		slices.Contains(machine.Capabilities, "CAP_SYS_RESOURCE") == machine.CanLowerOOMAdj, "%q, but CanLowerOOMAdj is %v", machine.Capabilities, machine.CanLowerOOMAdj)
	// A higher value needs no capability.
	for wanted, near := range map[int]int{-998: 200, 1000: 1000} {
		harness.Same(t, fmt.Sprintf("without CAP_SYS_RESOURCE %d becomes", wanted), (Machine{OOMScoreAdj: 200}).OOMScoreAdjNear(wanted), near)
	}
	near := machine.OOMScoreAdjNear(-998)
	script := fmt.Sprintf("printf %%d %d > /proc/self/oom_score_adj && cat /proc/self/oom_score_adj", near)
	out, err := exec.Command("sh", "-c", script).CombinedOutput()
	harness.Want(t, err == nil && string(out) == fmt.Sprintln(near), "oom_score_adj %d, chosen by %+v: %v: %s", near, machine, err, out)
	harness.Want(t, machine.CanLowerOOMAdj || near == max(-998, machine.OOMScoreAdj), "%+v: %d is not the nearest value", machine, near)
}

// Directories that the node needs are never relabelled, whatever their spelling, and what is below them may be.
func TestCheckRelabel(t *testing.T) {
	for _, path := range []string{"/", "//", "/etc", "/etc/", "/usr", "/usr/.", "/var/../etc", "/var/lib"} {
		harness.Want(t, CheckRelabel(path) != nil, "%s may be relabelled", path)
		harness.Want(t, (Machine{SELinux: true}).Relabel(path, "system_u:object_r:container_file_t:s0", false) != nil,
			"%s has been relabelled", path)
	}
	for _, path := range []string{"/etc/app", "/var/lib/kubelet/pods/1/volumes/x", "/data"} {
		harness.Check(t, CheckRelabel(path))
	}
}

// Every feature has all that a report shows, and a probe leaves no descriptor.
func TestFeatures(t *testing.T) {
	names := make(map[string]bool)
	before := descriptors(t)
	for _, f := range Features(t.TempDir()) {
		harness.Want(t, f.Name != "", "%+v lacks something, or is there twice", f)
		harness.Want(t, f.Since != "", "%+v lacks something, or is there twice", f)
		harness.Want(t, f.Without != "", "%+v lacks something, or is there twice", f)
		harness.Want(t, f.Probe != nil, "%+v lacks something, or is there twice", f)
		harness.Want(t, !names[f.Name], "%+v lacks something, or is there twice", f)
		names[f.Name] = true
		err := f.Probe()
		harness.Want(t, err == nil || !f.Required, "%s: %v, but this project's tests run pods on this machine", f.Name, err)
	}
	harness.Same(t, "descriptors after the probes", descriptors(t), before)
}

// What is said of a feature is what the kernel does when it is used.
func TestRecursiveReadOnlyIsTrue(t *testing.T) {
	dir := t.TempDir()
	tree, err := unix.OpenTree(unix.AT_FDCWD, dir, unix.OPEN_TREE_CLONE|unix.OPEN_TREE_CLOEXEC)
	harness.Need(t, err == nil, "open_tree (this test needs root): %v", err)
	defer unix.Close(tree)
	err = unix.MountSetattr(tree, "", unix.AT_EMPTY_PATH|unix.AT_RECURSIVE, &unix.MountAttr{Attr_set: unix.MOUNT_ATTR_RDONLY})
	probed := probeRecursiveReadOnly()
	harness.Want(t, (err == nil) == (probed == nil), "the kernel says %v, the probe %v", err, probed)
}

func descriptors(t *testing.T) int {
	entries, err := os.ReadDir("/proc/self/fd")
	harness.Check(t, err)
	return len(entries)
}

// The probe of mapped owners says yes where they can be mapped, and leaves nothing behind:
// no mount, no file, no process, no descriptor.
func TestProbeUserNamespaces(t *testing.T) {
	root := t.TempDir()
	mounts := harness.Read(t, "/proc/self/mountinfo")
	before := descriptors(t)
	for _, dir := range []string{root, filepath.Join(root, "not", "there")} {
		harness.Same(t, dir, probeUserNamespaces(dir), nil)
	}
	closed := filepath.Join(root, "closed")
	harness.Check(t, os.Mkdir(closed, 0o700))
	m := Machine{UserNamespaces: true, root: filepath.Join(closed, "a", "root")}
	harness.WantError(t, canMapUsers(m.root), closed+" of mode 0700", "chmod o+x")
	harness.WantError(t, m.MapsUsers(), "chmod o+x")
	for _, dir := range []string{closed, root, filepath.Dir(root)} {
		harness.Check(t, os.Chmod(dir, 0o711)) // while the daemon runs
	}
	harness.Check(t, m.MapsUsers())
	harness.Check(t, os.Remove(closed))
	// A file system whose owners cannot be mapped is found out.
	harness.Want(t, probeUserNamespaces("/proc") != nil, "/proc has mapped owners")
	after := harness.Read(t, "/proc/self/mountinfo")
	left, err := os.ReadDir(root)
	children, _ := os.ReadFile("/proc/thread-self/children")
	if now := descriptors(t); err != nil || string(after) != string(mounts) || len(left) > 0 || now != before || strings.TrimSpace(string(children)) != "" {
		t.Errorf("left: files %v (%v), %d descriptors, before %d, processes %s, mounts\n%s\nbefore\n%s", left, err, now, before, children, after, mounts)
	}
}
