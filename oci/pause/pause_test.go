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
	"time"
)

func TestBinaryIsSmall(t *testing.T) {
	elf, err := Binary()
	if err != nil {
		t.Fatal(err)
	}
	if len(elf) == 0 || len(elf) >= 16<<10 {
		t.Fatalf("pause.elf has %d bytes, want 1 to 16383", len(elf))
	}
}

func TestEndsAtSignals(t *testing.T) {
	for _, sig := range []syscall.Signal{syscall.SIGTERM, syscall.SIGINT} {
		t.Run(sig.String(), func(t *testing.T) {
			// The least of them: the machine may be busy.
			least := time.Hour
			for try := 0; try < 20 && least > 50*time.Millisecond; try++ {
				least = min(least, endsAt(t, sig))
			}
			if least > 50*time.Millisecond {
				t.Errorf("pause took %v to end at %v, want < 50ms", least, sig)
			}
		})
	}
}

func endsAt(t *testing.T, sig syscall.Signal) (took time.Duration) {
	t.Helper()
	cmd := startAsPid1(t)
	begin := time.Now()
	if err := cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("pause ended badly at %v: %v", sig, err)
	}
	return time.Since(begin)
}

func TestOutlivesOtherSignals(t *testing.T) {
	cmd := startAsPid1(t)
	for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGPIPE, syscall.SIGCHLD} {
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(20 * time.Millisecond)
	awaitRest(t, cmd.Process.Pid)
}

// TestReapsOrphans leaves two orphans in pause's pid namespace and waits for
// them to be gone, not zombies.
func TestReapsOrphans(t *testing.T) {
	cmd := startAsPid1(t)
	pid := strconv.Itoa(cmd.Process.Pid)
	orphans := exec.Command("nsenter", "--pid", "--target", pid, "sh", "-c", "sleep 600 & sleep 600 &")
	if err := orphans.Run(); err != nil {
		t.Fatalf("make orphans: %v", err)
	}
	adopted := children(t, pid)
	if len(adopted) != 2 {
		t.Fatalf("pause adopted %d orphans, want 2", len(adopted))
	}
	for _, orphan := range adopted {
		number, err := strconv.Atoi(orphan)
		if err == nil {
			err = syscall.Kill(number, syscall.SIGKILL)
		}
		if err != nil {
			t.Fatal(err)
		}
	}
	deadline := time.Now().Add(time.Minute)
	for len(children(t, pid)) > 0 {
		if time.Now().After(deadline) {
			t.Fatalf("orphans %v are not reaped", children(t, pid))
		}
		time.Sleep(5 * time.Millisecond)
	}
}

// startAsPid1 runs the embedded program as the first process of a new pid
// namespace and waits until it sleeps, which is when its signals are blocked.
func startAsPid1(t *testing.T) *exec.Cmd {
	t.Helper()
	elf, err := Binary()
	if err != nil {
		t.Fatal(err)
	}
	path := filepath.Join(t.TempDir(), "pause")
	if err := os.WriteFile(path, elf, 0o755); err != nil {
		t.Fatal(err)
	}
	cmd := exec.Command(path)
	cmd.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID}
	if err := cmd.Start(); err != nil {
		t.Fatalf("start pause in a new pid namespace (needs root): %v", err)
	}
	t.Cleanup(func() {
		_ = cmd.Process.Kill()
		_ = cmd.Wait()
	})
	awaitRest(t, cmd.Process.Pid)
	return cmd
}

// awaitRest waits until a process sleeps.
func awaitRest(t *testing.T, pid int) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); processState(t, pid) != "S"; time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("process %d does not come to rest, its state is %s", pid, processState(t, pid))
		}
	}
}

func children(t *testing.T, pid string) []string {
	t.Helper()
	list, err := os.ReadFile(fmt.Sprintf("/proc/%s/task/%s/children", pid, pid))
	if err != nil {
		t.Fatal(err)
	}
	return strings.Fields(string(list))
}

func processState(t *testing.T, pid int) string {
	t.Helper()
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	if err != nil {
		t.Fatal(err)
	}
	_, rest, _ := strings.Cut(string(stat), ") ")
	return rest[:1]
}
