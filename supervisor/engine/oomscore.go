package engine

import (
	"fmt"
	"os"
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

// hasCapability reports whether capability number c is in our effective set.
func hasCapability(c int) bool {
	header := unix.CapUserHeader{Version: unix.LINUX_CAPABILITY_VERSION_3}
	var data [2]unix.CapUserData
	if err := unix.Capget(&header, &data[0]); err != nil {
		return false
	}
	return data[c/32].Effective&(1<<(c%32)) != 0
}
