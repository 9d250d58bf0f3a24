package starter

import (
	"context"
	"fmt"
	"log/slog"
	"os"
	"os/exec"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// A supervisor that is killed while it ends a starter leaves that stopped: the kernel ends it.
func TestStarterStoppedByADeadSupervisor(t *testing.T) {
	const as = "MINICRI_TEST_AS"
	switch {
	case len(os.Args) > 1 && os.Args[1] == Command: // the starter
		time.Sleep(time.Hour)
	case os.Getenv(as) == "supervisor":
		supervise(t)
	}
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		t.Fatal(err)
	}
	supervisor := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$")
	supervisor.Env = append(os.Environ(), as+"=supervisor")
	supervisor.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	said, err := supervisor.Output()
	if err == nil || !strings.HasSuffix(err.Error(), "signal: killed") {
		t.Fatalf("%v: %s", err, said)
	}
	var pid int
	if _, err := fmt.Sscan(string(said), &pid); err != nil {
		t.Fatal(err)
	}
	var status unix.WaitStatus
	if _, err := unix.Wait4(pid, &status, 0, nil); err != nil || status.Signal() != unix.SIGHUP {
		t.Errorf("it ended with %v, %v", status, err)
	}
}

// supervise starts and stops a starter, names it, and dies.
func supervise(t *testing.T) {
	family, err := process.NewParent()
	if err != nil {
		t.Fatal(err)
	}
	go family.Run(context.Background())
	starters, err := New(family, slog.Default())
	if err != nil {
		t.Fatal(err)
	}
	one, err := starters.get()
	if err != nil {
		t.Fatal(err)
	}
	for !process.HasStopped(one.child.PID) {
		_ = unix.Kill(one.child.PID, unix.SIGSTOP)
	}
	fmt.Println(one.child.PID)
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	time.Sleep(time.Hour)
}
