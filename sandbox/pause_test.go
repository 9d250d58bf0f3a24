package sandbox

import (
	"context"
	"errors"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
)

// preparing is a pod of the node's network whose pause is about to be made,
// by the real shim.
func preparing(t *testing.T) (*Store, *creation) {
	t.Helper()
	s := checker(t)
	s.options.Root, s.options.State = openDirectory(t), openDirectory(t)
	s.SetLimits(Limits{Kill: time.Minute})
	s.options.CgroupParent = fmt.Sprintf("/minicri-unit-%d", os.Getpid())
	var err, machineErr, shimErr error
	var binary string
	s.options.Hierarchies, err = cgroup.FindHierarchies()
	s.options.Machine, machineErr = machine.Read(t.TempDir())
	binary, shimErr = filepath.Abs("../bin/minicri-shim")
	must(t, errors.Join(err, machineErr, shimErr, s.installPause()))
	if _, err := os.Stat(binary); err != nil {
		t.Fatalf("run 'make build': %v", err)
	}
	s.supervise(t, binary)
	config := named("web", 0)
	config.Linux = &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
		NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE},
	}}
	sb, _, err := s.reserve(config, "", step.NewTimeline(nil))
	if err == nil {
		err = os.MkdirAll(s.Dir(sb.ID), 0o711)
	}
	must(t, err)
	t.Cleanup(func() {
		err := errors.Join(s.removeProcesses(sb), s.options.Supervisors.End(context.Background(), sb.Supervisor), s.options.Hierarchies.Remove(s.options.CgroupParent, time.Minute))
		if err != nil {
			t.Error(err)
		}
	})
	return s, &creation{Sandbox: sb, owner: s}
}

// supervise gives the store a supervisor of this program.
func (s *Store) supervise(t *testing.T, binary string) {
	t.Helper()
	set, err := client.NewSet(client.SetOptions{
		Dir: filepath.Join(s.options.State, "shims"), Start: client.StartOptions{Binary: binary}, Answer: time.Minute, Logger: slog.New(slog.DiscardHandler),
	})
	must(t, err)
	t.Cleanup(set.Close)
	s.options.Supervisors = set
	s.options.Group = "pod" // short: sockets are below
}

// openDirectory is one that processes of other users can go through.
func openDirectory(t *testing.T) string {
	t.Helper()
	directory, err := os.MkdirTemp("", "sandbox-test-")
	if err == nil {
		err = os.Chmod(directory, 0o755)
	}
	must(t, err)
	t.Cleanup(func() { _ = os.RemoveAll(directory) })
	return directory
}

func (c *creation) wantNoPause(t *testing.T) {
	t.Helper()
	if pids, err := c.owner.options.Hierarchies.Processes(cgroup.Path(c.CgroupsPath)); err != nil || len(pids) > 0 {
		t.Errorf("processes left in the cgroup: %v, %v", pids, err)
	}
}

// A supervisor that is killed while pause waits for ADD is replaced by one that
// adopts pause: the pod starts all the same.
func TestPauseIsReleasedByASuccessor(t *testing.T) {
	s, c := preparing(t)
	must(t, c.preparePause(t.Context()))
	killSupervisor(t, s.options.Supervisors.Dir(c.Supervisor))
	running, err := s.startPause(t.Context(), c.Sandbox, c.prepared)
	must(t, err)
	defer running.Close()
	wantPause(t, running.PID)
}

// wantPause waits for the arguments of pause, which is released and may not have come to
// its execve yet.
func wantPause(t *testing.T, pid int) {
	t.Helper()
	var program []byte
	var err error
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); time.Sleep(time.Millisecond) {
		if program, err = os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid)); string(program) == oci.PauseProgram+"\x00" {
			return
		}
	}
	t.Errorf("process %d is %q, %v", pid, program, err)
}

// What was prepared goes also when its supervisor was killed.
func TestPauseIsAbortedAfterTheSupervisorWasKilled(t *testing.T) {
	s, c := preparing(t)
	must(t, c.preparePause(t.Context()))
	killSupervisor(t, s.options.Supervisors.Dir(c.Supervisor))
	if err := s.removeProcesses(c.Sandbox); err != nil {
		t.Errorf("abort: %v", err)
	}
	c.wantNoPause(t)
}

// killSupervisor kills who serves a directory, by its socket (SO_PEERCRED).
func killSupervisor(t *testing.T, dir string) {
	t.Helper()
	conn, err := net.Dial("unix", filepath.Join(dir, api.ControlSocket))
	must(t, err)
	defer conn.Close()
	raw, err := conn.(*net.UnixConn).SyscallConn()
	must(t, err)
	var peer *unix.Ucred
	var peerErr error
	err = raw.Control(func(fd uintptr) { peer, peerErr = unix.GetsockoptUcred(int(fd), unix.SOL_SOCKET, unix.SO_PEERCRED) })
	must(t, errors.Join(err, peerErr))
	must(t, unix.Kill(int(peer.Pid), unix.SIGKILL))
	_, _ = io.Copy(io.Discard, conn) // its end
}

// What the shim says of its failure reaches the caller.
func TestShimThatFails(t *testing.T) {
	s, c := preparing(t)
	must(t, os.Remove(s.pauseProgram()))
	err := c.preparePause(t.Context())
	if err == nil {
		_, err = s.startPause(t.Context(), c.Sandbox, c.prepared)
	}
	if err == nil || !strings.Contains(err.Error(), "/pause") {
		t.Errorf("without a pause program: %v", err)
	}
	s.supervise(t, "/nowhere/minicri-shim")
	c.Supervisor = "another"
	if err := c.preparePause(t.Context()); err == nil || !strings.Contains(err.Error(), "/nowhere/minicri-shim") {
		t.Errorf("without a shim: %v", err)
	}
	if err := s.deletePause(c.Sandbox); err != nil {
		t.Errorf("the end of what never was: %v", err)
	}
}
