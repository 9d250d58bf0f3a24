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

// Memory is what the node cannot take back from a process, in KiB: its anonymous and
// shmem pages. Pages of its program and of other files are not counted: the kernel
// drops them when memory is short, after it has written those that are dirty.
func Memory(pid int) (kib int, err error) {
	return MemoryOf(procFile(pid, "smaps_rollup"))
}

// MemoryOf is that of a smaps_rollup (proc_pid_smaps(5)). It has Private_Dirty too, but
// that says nothing else: private dirty pages are anonymous, or shmem, or pages of a
// file that is not written yet. A program that was built just now has 10 MiB of those.
func MemoryOf(rollup string) (kib int, err error) {
	data, err := os.ReadFile(rollup)
	if err != nil {
		return 0, err
	}
	anonymous, err := rollupField(data, rollup, "Anonymous")
	if err != nil {
		return 0, err
	}
	shmem, err := rollupField(data, rollup, "Pss_Shmem")
	return anonymous + shmem, err
}

func rollupField(rollup []byte, path, name string) (kib int, err error) {
	for line := range strings.Lines(string(rollup)) {
		if value, found := strings.CutPrefix(line, name+":"); found {
			_, err := fmt.Sscanf(value, "%d kB", &kib)
			return kib, err
		}
	}
	return 0, fmt.Errorf("%s has no %s", path, name)
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
