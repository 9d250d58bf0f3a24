package client

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
)

// A directory that is locked and does not answer has a supervisor that is about to end,
// or one that no connection reaches. The former is waited for.
const holderGrace = 2 * time.Second

// holderKill is how long a supervisor may take to end after SIGKILL.
const holderKill = 5 * time.Second

// endHolder ends the supervisor that has the lock of a directory and does not answer.
// The error names a process that is no supervisor of ours.
func endHolder(dir string) error {
	pid, err := api.LockHolder(dir)
	if err != nil || pid == 0 {
		return err
	}
	holder, err := openProcess(pid)
	if errors.Is(err, process.ErrGone) {
		return nil
	}
	if err != nil {
		return err
	}
	defer holder.Close()
	if again, err := api.LockHolder(dir); err != nil || again != pid {
		return err // the pid may have been given to another process before it was opened
	}
	if line := commandLine(pid); !serves(line, dir) {
		return fmt.Errorf("%s/%s is locked by process %d (%s), which is no supervisor: end that process: %w", dir, api.LockFile, pid, strings.Join(line, " "), errdefs.ErrUnavailable)
	}
	if err := holder.Kill(holderKill); err != nil {
		return fmt.Errorf("end the supervisor that has %s locked and does not answer: %w: %w", dir, errdefs.ErrUnavailable, err)
	}
	return nil
}

// openProcess finds the process that has a pid now.
func openProcess(pid int) (*process.Process, error) {
	stat, err := process.ReadStat(pid)
	if err != nil {
		return nil, err
	}
	return process.Open(process.Facts{PID: pid, StartTime: stat.StartTime})
}

// serves reports whether a command line is that of the supervisor of a directory.
func serves(line []string, dir string) bool {
	return len(line) > 1 && line[0] == Name && line[1] == "serve" && slices.Contains(line, dir)
}

func commandLine(pid int) []string {
	content, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)) // "" if it has ended
	return strings.Split(strings.TrimSuffix(string(content), "\x00"), "\x00")
}
