package doctor

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/machine"
)

func (c *checker) kernel() {
	major, minor, release := kernelVersion()
	c.when(major > 5 || major == 5 && minor >= 10, Problem, "kernel", "Linux "+release,
		"Linux "+release+" is older than 5.10", "run a newer kernel: pidfds and mount calls are missing in this one")
	c.features()
	c.when(number("/proc/sys/net/ipv4/ip_forward") == 1, Warning, "forwarding", "on",
		"off in this network namespace", "sysctl -w net.ipv4.ip_forward=1, unless the network plugin does so")
	c.capabilities()
}

// features asks for what not every kernel has.
func (c *checker) features() {
	for _, f := range machine.Features(c.Config.Root) {
		err := f.Probe()
		if err == nil {
			c.add(f.Name, Good, "there", "")
			continue
		}
		grade := Warning
		if f.Required {
			grade = Problem
		}
		c.add(f.Name, grade, fmt.Sprintf("not there: %v", err), fmt.Sprintf("%s; it came with Linux %s", f.Without, f.Since))
	}
}

func (c *checker) capabilities() {
	c.when(os.Geteuid() == 0, Problem, "user", "root", "not root", "the daemon has to be root")
	m, err := machine.Read(c.Config.Root)
	if err != nil {
		c.add("capabilities", Problem, err.Error(), "")
		return
	}
	if m.SELinux {
		c.when(m.SELinuxProblem == "", Problem, "SELinux", "its policy knows containers", m.SELinuxProblem, "or boot with selinux=0")
	}
	c.when(m.CanLowerOOMAdj, Warning, "CAP_SYS_RESOURCE", "there",
		fmt.Sprintf("not there: no process gets an oom_score_adj below %d", m.OOMScoreAdj), "pods run, less protected from the OOM killer")
}

func (c *checker) cgroups() {
	hierarchies, err := cgroup.FindHierarchies()
	if err != nil {
		c.add("cgroups", Problem, err.Error(), "")
		return
	}
	version := "v1"
	if cgroup.Unified() {
		version = "v2"
	}
	c.add("cgroups", Good, fmt.Sprintf("%s, %d hierarchies", version, len(hierarchies)), "")
	for _, controller := range []string{"cpu", "memory", "pids", "cpuset"} {
		if !hasController(hierarchies, controller) {
			c.add("cgroups", Warning, "no controller "+controller, "limits of that kind are not enforced: enable it at boot")
		}
	}
}

func hasController(hierarchies cgroup.Hierarchies, controller string) bool {
	for _, hierarchy := range hierarchies {
		if strings.Contains(","+filepath.Base(hierarchy)+",", ","+controller+",") {
			return true
		}
		enabled, err := os.ReadFile(filepath.Join(hierarchy, "cgroup.controllers"))
		if err == nil && strings.Contains(" "+strings.TrimSpace(string(enabled))+" ", " "+controller+" ") {
			return true
		}
	}
	return false
}

func kernelVersion() (major, minor int, release string) {
	var name unix.Utsname
	if err := unix.Uname(&name); err != nil {
		return 0, 0, err.Error()
	}
	release = unix.ByteSliceToString(name.Release[:])
	_, _ = fmt.Sscanf(release, "%d.%d", &major, &minor) // 0.0 when it has another form
	return major, minor, release
}

// number reads a file with one number; 0 when there is none.
func number(file string) int {
	text, _ := os.ReadFile(file)
	n, _ := strconv.Atoi(strings.TrimSpace(string(text)))
	return n
}
