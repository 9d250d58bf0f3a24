package starter

import (
	"context"
	"fmt"
	"log/slog"
	"net"
	"os"
	"os/exec"
	"slices"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/test/harness"
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
	harness.Check(t, unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0))
	supervisor := exec.Command("/proc/self/exe", "-test.run=^"+t.Name()+"$")
	supervisor.Env = append(os.Environ(), as+"=supervisor")
	supervisor.SysProcAttr = &unix.SysProcAttr{Setsid: true}
	said, err := supervisor.Output()
	harness.Want(t, err != nil && strings.HasSuffix(err.Error(), "signal: killed"), "%v: %s", err, said)
	var pid int
	_, err = fmt.Sscan(string(said), &pid)
	harness.Check(t, err)
	var status unix.WaitStatus
	_, err = unix.Wait4(pid, &status, 0, nil)
	harness.Want(t, err == nil && status.Signal() == unix.SIGHUP, "it ended with %v, %v", status, err)
}

// supervise starts and stops a starter, names it, and dies.
func supervise(t *testing.T) {
	family, err := process.NewParent()
	harness.Check(t, err)
	go family.Run(context.Background())
	starters, err := New(family, slog.Default())
	harness.Check(t, err)
	one, err := starters.get()
	harness.Check(t, err)
	for !process.HasStopped(one.child.PID) {
		_ = unix.Kill(one.child.PID, unix.SIGSTOP)
	}
	fmt.Println(one.child.PID)
	_ = unix.Kill(os.Getpid(), unix.SIGKILL)
	time.Sleep(time.Hour)
}

// FuzzReceive: what a peer writes and sends along is a message, or an error; it has four
// descriptors at most, and no other stays open.
func FuzzReceive(f *testing.F) {
	f.Add([]byte("\x00"+`{"verb":"exec","id":"a","streams":[true,true,true],"process":{"args":["sh"]},"exec_cgroup":{"sub":"b"}}`), uint8(3))
	f.Add([]byte("\x00"+`{"pid":1,"cgroups":{"":"/a"},"error":"no","kind":"not found"}`), uint8(0))
	f.Add([]byte("\x00{"), uint8(199))
	f.Fuzz(func(t *testing.T, sent []byte, descriptors uint8) {
		if len(sent) == 0 || len(sent) > 64<<10 {
			return // more than the socket holds
		}
		open := func() int {
			entries, err := os.ReadDir("/proc/self/fd")
			harness.Check(t, err)
			return len(entries)
		}
		before := open()
		pair, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
		harness.Check(t, err)
		rights := unix.UnixRights(slices.Repeat(pair[:1], int(descriptors)%200)...)
		harness.Check(t, unix.Sendmsg(pair[1], sent, rights, nil, 0))
		harness.Check(t, unix.Close(pair[1]))
		end := os.NewFile(uintptr(pair[0]), "end")
		conn, err := net.FileConn(end)
		harness.Check(t, err)
		_ = end.Close()
		var request Request
		files, _, err := socket.ReceiveMessage(conn.(*net.UnixConn), &request)
		harness.Want(t, len(files) <= 4, "%d descriptors, %v", len(files), err)
		socket.CloseAll(files...)
		_ = conn.Close()
		harness.Same(t, "open descriptors", open(), before)
	})
}
