package starter

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
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
		if err := (Cgroups{"": path}).Signal("", syscall.SIGTERM); err != nil {
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

// Containers of a program that are removed at the same moment leave none of its
// directories: whichever is the last removes them.
func TestRemoveOfContainersAtOnce(t *testing.T) {
	for range 200 {
		root := filepath.Join(t.TempDir(), "runc")
		var removals sync.WaitGroup
		ids := []string{"one", "two", "three"}
		for _, id := range ids {
			if err := errors.Join(os.MkdirAll(filepath.Join(root, id), 0o700), os.MkdirAll(filepath.Join(root, ProgramStates, id), 0o700)); err != nil {
				t.Fatal(err)
			}
		}
		for _, id := range ids {
			removals.Go(func() {
				if err := (Container{ID: id, Root: root, Program: []string{"runc"}}).Remove(); err != nil {
					t.Error(err)
				}
			})
		}
		removals.Wait()
		if _, err := os.Stat(root); !errors.Is(err, os.ErrNotExist) {
			t.Fatalf("the program's directory is left: %v", err)
		}
	}
}
