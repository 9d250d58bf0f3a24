package e2e

import (
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/moby/sys/mountinfo"
)

// cri: LinuxPodSandboxConfig.cgroup_parent PodSandboxConfig.linux
func TestPauseIsBelowTheCgroupParentInEveryHierarchy(t *testing.T) {
	n := newNode(t)
	config := n.PodConfig("web")
	config.Linux.CgroupParent = n.MakeCgroup("pod1")
	pid := pausePID(t, n, n.RunPod(config))
	v1, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup"))
	check(t, err)
	found := 0
	for line := range strings.Lines(procFile(t, pid, "cgroup")) {
		// HIERARCHY:CONTROLLERS:PATH, cgroups(7)
		fields := strings.SplitN(strings.TrimSpace(line), ":", 3)
		if len(v1) > 0 && fields[1] == "" {
			continue // hybrid: the version 2 hierarchy has no controllers
		}
		found++
		if !strings.HasPrefix(fields[2], config.Linux.CgroupParent+"/") {
			t.Errorf("in the hierarchy %q pause is in %s", fields[1], fields[2])
		}
	}
	if want := max(len(v1), 1); found != want {
		t.Errorf("want pause in %d hierarchies, it is in %d", want, found)
	}
}

func TestCgroupParentOfPodsThatNameNone(t *testing.T) {
	n := newNode(t)
	config := n.PodConfig("web")
	config.Linux.CgroupParent = ""
	info := verbose(t, n, n.RunPod(config))
	if !strings.HasPrefix(info.CgroupsPath, n.CgroupParent+"/") || !strings.Contains(procFile(t, info.PID, "cgroup"), info.CgroupsPath) {
		t.Errorf("want below %s, got %s; pause is in\n%s", n.CgroupParent, info.CgroupsPath, procFile(t, info.PID, "cgroup"))
	}
}

// The cgroup of the pod is the kubelet's: only what was made below it goes.
func TestCgroupParentStays(t *testing.T) {
	n := newNode(t)
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	check(t, err)
	check(t, remove(t, n, n.RunPod(n.PodConfig("web"))))
	for _, m := range mounts {
		below, err := filepath.Glob(filepath.Join(m.Mountpoint, n.CgroupParent, "*", "cgroup.procs"))
		check(t, err)
		// Those that the daemon keeps for runs of plugins were there before.
		below = slices.DeleteFunc(below, func(path string) bool { return strings.Contains(path, "-pool-") })
		if _, err := os.Stat(filepath.Join(m.Mountpoint, n.CgroupParent)); err != nil || len(below) != 0 {
			t.Errorf("in %s: %v, left %v", m.Mountpoint, err, below)
		}
	}
}

func TestSystemdDriverWantsSlices(t *testing.T) {
	n := newNode(t)
	file := filepath.Join(n.Dir, "systemd.toml")
	check(t, os.WriteFile(file, []byte("cgroup_driver = \"systemd\"\ncgroup_parent = \"/not/a/slice\"\n"), 0o600))
	output, err := n.RunDaemon("--config", file, "--root", n.Dir+"/r2", "--state", n.Dir+"/s2", "--socket", n.Dir+"/2.sock")
	if err == nil || !strings.Contains(output, "cgroup_parent") {
		t.Errorf("got error %v, output %s", err, output)
	}
}
