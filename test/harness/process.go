package harness

import (
	"cmp"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// IgnoreMissing is nil for the error of a file that is not there.
func IgnoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

// CgroupDriver is that of all nodes: cgroupfs, or what the environment says. systemd needs a machine that it
// runs, and no process namespace between: it takes the ids of processes as it sees them.
func CgroupDriver() string { return cmp.Or(os.Getenv("MINICRI_CGROUP_DRIVER"), "cgroupfs") }

// ProcStatus is a field of /proc/PID/status, with one blank between its words.
func ProcStatus(t testing.TB, pid int, field string) string {
	t.Helper()
	for line := range strings.Lines(string(Read(t, fmt.Sprintf("/proc/%d/status", pid)))) {
		if value, found := strings.CutPrefix(line, field+":"); found {
			return strings.Join(strings.Fields(value), " ")
		}
	}
	t.Fatalf("/proc/%d/status has no %s", pid, field)
	return ""
}

// ProcKiB is such a field in KiB.
func ProcKiB(t testing.TB, pid int, field string) (kib int) {
	_, err := fmt.Sscanf(ProcStatus(t, pid, field), "%d kB", &kib)
	Check(t, err)
	return kib
}

// Process is one of /proc.
type Process struct {
	process.Stat
	PID  int
	Args []string
}

// Processes are those in sight.
func Processes() (all []Process) {
	paths, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range paths {
		line, _ := os.ReadFile(path) // it may have ended
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if stat, err := process.ReadStat(pid); err == nil {
			all = append(all, Process{stat, pid, strings.Split(string(line), "\x00")})
		}
	}
	return all
}

// KernelTellsExits reports whether Linux tells by a pidfd how a process ended, as from 6.15 on.
func KernelTellsExits() bool {
	var name unix.Utsname
	_ = unix.Uname(&name)
	var major, minor int
	_, _ = fmt.Sscanf(unix.ByteSliceToString(name.Release[:]), "%d.%d", &major, &minor)
	return major > 6 || major == 6 && minor >= 15
}

// Freeze stops a process until the test's end, and waits until no thread of it runs: one of them has to see the signal
// before the others stop.
func Freeze(t testing.TB, pid int) {
	t.Helper()
	Check(t, unix.Kill(pid, unix.SIGSTOP))
	t.Cleanup(func() { _ = unix.Kill(pid, unix.SIGCONT) }) // it may have been killed
	Eventually(t, "it has stopped", func() bool { return process.HasStopped(pid) })
}
