package cgroup

import (
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"syscall"
	"testing"
	"time"
)

// A version 2 cgroup lists processes of another pid namespace as 0
// (pid_namespaces(7)): a signal to that would be one to our own process group.
func TestSignalsToACgroupNeverReachOurselves(t *testing.T) {
	if path := os.Getenv("MINICRI_TEST_CGROUP"); path != "" { // in a pid namespace of its own
		if content, err := os.ReadFile(filepath.Join(path, "cgroup.procs")); err != nil || string(content) != "0\n" {
			t.Errorf("the kernel lists %q, %v", content, err)
		}
		if err := (Paths{"": path}).Signal(syscall.SIGTERM); err != nil {
			t.Error(err)
		}
		time.Sleep(200 * time.Millisecond) // it would end us
		return
	}
	root := "/sys/fs/cgroup/unified" // of a hybrid machine
	if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
		root = "/sys/fs/cgroup"
	}
	path := filepath.Join(root, fmt.Sprintf("minicri-unit-cgroup-%d", os.Getpid()))
	if err := os.Mkdir(path, 0o755); err != nil {
		t.Fatal(err)
	}
	sleeper := exec.Command("sleep", "1000")
	if err := sleeper.Start(); err != nil {
		t.Fatal(err)
	}
	defer func() {
		_ = sleeper.Process.Kill()
		_ = sleeper.Wait()
		if err := os.Remove(path); err != nil {
			t.Error(err)
		}
	}()
	if err := os.WriteFile(filepath.Join(path, "cgroup.procs"), []byte(strconv.Itoa(sleeper.Process.Pid)), 0); err != nil {
		t.Fatal(err)
	}
	inside := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	inside.Env = append(os.Environ(), "MINICRI_TEST_CGROUP="+path)
	inside.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Setpgid: true}
	if said, err := inside.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, said)
	}
}
