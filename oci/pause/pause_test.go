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
		t.Run(sig.String(), func(t *testing.T) { endsAt(t, sig) })
	}
}

func endsAt(t *testing.T, sig syscall.Signal) {
	cmd := startAsPid1(t)
	begin := time.Now()
	if err := cmd.Process.Signal(sig); err != nil {
		t.Fatal(err)
	}
	if err := cmd.Wait(); err != nil {
		t.Fatalf("pause ended badly at %v: %v", sig, err)
	}
	if took := time.Since(begin); took > 50*time.Millisecond {
		t.Errorf("pause took %v to end at %v, want < 50ms", took, sig)
	}
}

func TestOutlivesOtherSignals(t *testing.T) {
	cmd := startAsPid1(t)
	for _, sig := range []syscall.Signal{syscall.SIGHUP, syscall.SIGUSR1, syscall.SIGPIPE, syscall.SIGCHLD} {
		if err := cmd.Process.Signal(sig); err != nil {
			t.Fatal(err)
		}
	}
	time.Sleep(20 * time.Millisecond)
	if state := processState(t, cmd.Process.Pid); state != "S" {
		t.Errorf("pause is in state %s after harmless signals, want S (sleeping)", state)
	}
}

// TestReapsOrphans leaves two orphans in pause's pid namespace and waits for
// them to be gone, not zombies.
func TestReapsOrphans(t *testing.T) {
	cmd := startAsPid1(t)
	pid := strconv.Itoa(cmd.Process.Pid)
	orphans := exec.Command("nsenter", "--pid", "--target", pid, "sh", "-c", "sleep 0.2 & sleep 0.2 &")
	if err := orphans.Run(); err != nil {
		t.Fatalf("make orphans: %v", err)
	}
	if n := len(children(t, pid)); n != 2 {
		t.Fatalf("pause adopted %d orphans, want 2", n)
	}
	deadline := time.Now().Add(2 * time.Second)
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
	for deadline := time.Now().Add(time.Second); processState(t, cmd.Process.Pid) != "S"; {
		if time.Now().After(deadline) {
			t.Fatal("pause does not come to rest")
		}
		time.Sleep(time.Millisecond)
	}
	return cmd
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
