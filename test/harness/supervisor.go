package harness

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// Supervisors are the processes that supervise the node's pods.
func (n *Node) Supervisors() (pids []int) {
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range lines {
		line, _ := os.ReadFile(path) // it may have ended
		words := strings.Split(string(line), "\x00")
		if len(words) > 3 && words[1] == "serve" && strings.HasPrefix(words[3], n.State+"/") {
			pid, _ := strconv.Atoi(strings.Split(path, "/")[2])
			pids = append(pids, pid)
		}
	}
	// What one has forked, and has not executed its program yet, looks like it.
	forked := func(pid int) bool {
		stat, err := process.ReadStat(pid)
		return err != nil || slices.Contains(pids, stat.Parent)
	}
	return slices.DeleteFunc(slices.Clone(pids), forked)
}

// KernelTellsExits reports whether Linux tells by a pidfd how a process ended, as from 6.15 on.
func KernelTellsExits() bool {
	var name unix.Utsname
	_ = unix.Uname(&name)
	var major, minor int
	_, _ = fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor)
	return major > 6 || major == 6 && minor >= 15
}
