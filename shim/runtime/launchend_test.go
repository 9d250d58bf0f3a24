package runtime

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"
)

// A launch that hangs on its way into its cgroups, where killing what is in them does
// not reach it, is given up at once, and its process ends when it can.
func TestLaunchThatHangsBeforeItsCgroup(t *testing.T) {
	n := newNode(t)
	freezer := "/sys/fs/cgroup/freezer" + n.parent
	if _, err := os.Stat("/sys/fs/cgroup/freezer"); err != nil {
		t.Skip("version 2: a process is born in its cgroup, and can be killed there")
	}
	if err := errors.Join(os.Mkdir(freezer, 0o755), os.WriteFile(freezer+"/freezer.state", []byte("FROZEN"), 0)); err != nil {
		t.Fatal(err)
	}
	defer func() { _ = os.WriteFile(freezer+"/freezer.state", []byte("THAWED"), 0) }() // what is frozen cannot be killed
	failed := make(chan error, 1)
	go func() {
		_, _, err := n.make("hanging00", n.spec("hanging00"), nil)
		failed <- err
	}()
	pid := 0
	eventually(t, "the process is frozen", func() bool {
		content := read(freezer + "/hanging00/cgroup.procs")
		pid, _ = strconv.Atoi(strings.TrimSpace(content))
		return pid > 0
	})
	if own := read("/sys/fs/cgroup/pids" + n.parent + "/hanging00/cgroup.procs"); own != "" {
		t.Fatalf("it is in the cgroup that is killed: %q", own)
	}
	began := time.Now()
	if err := n.Abort("hanging00"); err != nil {
		t.Error(err)
	}
	select {
	case err := <-failed:
		if !errors.Is(err, errAborted) {
			t.Errorf("it failed with %v", err)
		}
	case <-time.After(launchLimit / 2):
		t.Fatal("it hangs after it was given up")
	}
	t.Logf("given up after %v", time.Since(began))
	if err := os.WriteFile(freezer+"/freezer.state", []byte("THAWED"), 0); err != nil {
		t.Fatal(err)
	}
	eventually(t, "the process has ended, and was waited for", func() bool { return syscall.Kill(pid, 0) != nil })
	left, _ := filepath.Glob("/sys/fs/cgroup/*" + n.parent + "/hanging00")
	for _, path := range append(left, "/sys/fs/cgroup"+n.parent+"/hanging00") { // as the daemon does
		_ = os.Remove(path)
	}
}

func eventually(t *testing.T, what string, holds func() bool) {
	t.Helper()
	for deadline := time.Now().Add(time.Minute); !holds(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatalf("not so: %s", what)
		}
	}
}
