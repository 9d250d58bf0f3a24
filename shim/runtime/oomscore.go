package runtime

import (
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

const ownOOMScoreAdj = "/proc/self/oom_score_adj"

// clampOOMScoreAdj raises a process's oom_score_adj to the nearest value that
// the kernel lets us give: without CAP_SYS_RESOURCE, not below our own
// (proc_pid_oom_score_adj(5)).
func clampOOMScoreAdj(p *specs.Process) error {
	if p.OOMScoreAdj == nil || hasCapability(unix.CAP_SYS_RESOURCE) {
		return nil
	}
	own, err := readOOMScoreAdj()
	if err != nil {
		return err
	}
	p.OOMScoreAdj = new(max(*p.OOMScoreAdj, own))
	return nil
}

func readOOMScoreAdj() (int, error) {
	content, err := os.ReadFile(ownOOMScoreAdj)
	if err != nil {
		return 0, err
	}
	own, err := strconv.Atoi(strings.TrimSpace(string(content)))
	if err != nil {
		return 0, fmt.Errorf("parse %s: %w", ownOOMScoreAdj, err)
	}
	return own, nil
}

// keptOOMScoreAdj is what an update has set, in a bundle: what runtimes know is
// what the container was made with, and execs would get that.
func keptOOMScoreAdj(bundle string) string { return filepath.Join(bundle, "oom_score_adj") }

func keepOOMScoreAdj(bundle string, adjust *int) error {
	if adjust == nil {
		return nil
	}
	return writeJSON(keptOOMScoreAdj(bundle), *adjust)
}

// withOOMScoreAdj is an exec's process with the container's oom_score_adj of now.
func withOOMScoreAdj(bundle string, process *specs.Process) *specs.Process {
	content, err := os.ReadFile(keptOOMScoreAdj(bundle))
	if err != nil || process.OOMScoreAdj != nil {
		return process
	}
	adjust, err := strconv.Atoi(string(content))
	if err != nil {
		return process
	}
	changed := *process
	changed.OOMScoreAdj = &adjust
	return &changed
}

// inheritOOMScoreAdj gives a run of the runtime that execs the container's
// oom_score_adj of now: crun leaves a command what it has inherited, which would be
// this program's. One that may not be set stays, as for the container.
func (c *commandContainer) inheritOOMScoreAdj(pid int) {
	process := withOOMScoreAdj(c.bundle, &specs.Process{})
	if spec, err := ReadSpec(c.bundle); err == nil && process.OOMScoreAdj == nil {
		process = spec.Process
	}
	if process.OOMScoreAdj != nil {
		_ = writeOOMScoreAdj(pid, strconv.Itoa(*process.OOMScoreAdj))
	}
}

// hasCapability reports whether capability number c is in our effective set.
func hasCapability(c int) bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return false
	}
	return data[c/32].Effective&(1<<(c%32)) != 0
}
