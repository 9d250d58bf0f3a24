package starter

import (
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// EndStopped ends the starters of a supervisor with this directory that died as it was
// ending them, stopped and not yet killed: no other signal would ever reach them.
func EndStopped(dir string) {
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline") // a good pattern
	for _, path := range lines {
		line, _ := os.ReadFile(path) // it may have ended
		if string(line) != strings.Join(arguments(), "\x00")+"\x00" {
			continue
		}
		environment, _ := os.ReadFile(filepath.Join(filepath.Dir(path), "environ"))
		pid, _ := strconv.Atoi(filepath.Base(filepath.Dir(path)))
		if slices.Contains(strings.Split(string(environment), "\x00"), of+"="+dir) && process.HasStopped(pid) {
			process.KillTree(pid)
		}
	}
}

// IsChild reports whether a process is a child of this one, also one that has ended.
func IsChild(pid int) bool {
	for {
		err := unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOHANG|unix.WNOWAIT, nil)
		if !errors.Is(err, unix.EINTR) {
			return err == nil
		}
	}
}
