package contender

import (
	"bytes"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"time"
)

// tick is the unit of times in /proc/PID/stat on Linux, USER_HZ of 100.
const tick = 10 * time.Millisecond

// CPU is the user and system time of a process since its start, in ticks of
// 10 ms: proc_pid_stat(5), fields 14 and 15.
func CPU(pid int) (time.Duration, error) { return cpuTime(pid, 2) }

// CPUWithChildren is CPU with that of the children which it waited for: fields
// 14 to 17.
func CPUWithChildren(pid int) (time.Duration, error) { return cpuTime(pid, 4) }

// cpuTime adds up fields from 14 on, of which 11 follow the name in brackets
// before it.
func cpuTime(pid, fields int) (sum time.Duration, err error) {
	data, err := os.ReadFile(procFile(pid, "stat"))
	if err != nil {
		return 0, err
	}
	for _, field := range strings.Fields(string(data[bytes.LastIndexByte(data, ')')+1:]))[11 : 11+fields] {
		n, err := strconv.ParseInt(field, 10, 64)
		if err != nil {
			return 0, err
		}
		sum += time.Duration(n) * tick
	}
	return sum, nil
}

// PeakMemory is the most resident memory that a process has had, in bytes.
func PeakMemory(pid int) (int64, error) {
	data, err := os.ReadFile(procFile(pid, "status"))
	if err != nil {
		return 0, err
	}
	_, rest, ok := strings.Cut(string(data), "VmHWM:")
	if !ok {
		return 0, errors.New("no VmHWM in " + procFile(pid, "status"))
	}
	kib, err := strconv.ParseInt(strings.Fields(rest)[0], 10, 64)
	return kib << 10, err
}

// PSS is the proportional set size of a process in KiB (proc_pid_smaps(5)).
func PSS(pid int) (kib int, err error) {
	data, err := os.ReadFile(procFile(pid, "smaps_rollup"))
	if err != nil {
		return 0, err
	}
	for line := range strings.Lines(string(data)) {
		if _, err := fmt.Sscanf(line, "Pss: %d kB", &kib); err == nil {
			return kib, nil
		}
	}
	return 0, fmt.Errorf("process %d: no Pss in its smaps_rollup", pid)
}

func procFile(pid int, name string) string {
	return filepath.Join("/proc", strconv.Itoa(pid), name)
}

// named lists the processes of this pid namespace by their name
// (proc_pid_comm(5): at most 15 characters).
func named(name string) (pids []int, err error) {
	entries, err := os.ReadDir("/proc")
	if err != nil {
		return nil, err
	}
	for _, entry := range entries {
		pid, err := strconv.Atoi(entry.Name())
		if err != nil {
			continue
		}
		comm, err := os.ReadFile(procFile(pid, "comm"))
		if err == nil && strings.TrimSpace(string(comm)) == name {
			pids = append(pids, pid)
		}
	}
	return pids, nil
}
