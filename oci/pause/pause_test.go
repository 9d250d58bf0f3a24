package pause

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"

	"github.com/minicri/minicri/test/harness"
)

// Pause is small; in a pid namespace of its own it outlives signals, reaps orphans, and ends at
// the two that ask for it.
func TestPause(t *testing.T) {
	elf, err := Binary()
	harness.Need(t, err == nil && len(elf) > 0, "pause.elf has %d bytes, want 1 to 16383: %v", len(elf), err)
	harness.Need(t, len(elf) < 16<<10, "pause.elf has %d bytes, want 1 to 16383: %v", len(elf), err)
	path := filepath.Join(t.TempDir(), "pause")
	harness.Check(t, os.WriteFile(path, elf, 0o755))
	for _, end := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		cmd := exec.Command(path)
		cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
		harness.Check(t, cmd.Start()) // needs root
		t.Cleanup(func() { _ = cmd.Process.Kill() })
		pid := strconv.Itoa(cmd.Process.Pid)
		sleeps(t, pid) // its signals are blocked by then
		for _, signal := range []syscall.Signal{syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGPIPE, syscall.SIGCHLD} {
			harness.Check(t, cmd.Process.Signal(signal))
		}
		harness.Check(t, exec.Command("nsenter", "--pid", "--target", pid, "sh", "-c", "sleep 600 & sleep 600 &").Run())
		orphans := children(t, pid)
		for _, orphan := range orphans {
			harness.Check(t, exec.Command("kill", "-KILL", orphan).Run())
		}
		harness.Same(t, "orphans that pause adopted", len(orphans), 2)
		harness.Eventually(t, "orphans are reaped", func() bool { return len(children(t, pid)) == 0 })
		sleeps(t, pid)
		harness.Check(t, cmd.Process.Signal(end))
		harness.Check(t, cmd.Wait())
	}
}

func sleeps(t *testing.T, pid string) {
	harness.Eventually(t, "pause sleeps", func() bool {
		stat := harness.Read(t, "/proc/"+pid+"/stat")
		return strings.Contains(string(stat), ") S ")
	})
}

func children(t *testing.T, pid string) []string {
	list := harness.Read(t, fmt.Sprintf("/proc/%s/task/%s/children", pid, pid))
	return strings.Fields(string(list))
}
