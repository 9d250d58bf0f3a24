package sandbox

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/oci"
)

func TestNeedsInterfaces(t *testing.T) {
	for name, want := range map[string]bool{
		"":                                    false,
		"kernel.shmmax":                       false,
		"net.core.somaxconn":                  false,
		"net.ipv4.tcp_syncookies":             false,
		"net.ipv4.ip_unprivileged_port_start": false,
		"net.ipv4.configure":                  false,
		"net.ipv4.conf.eth0.arp_filter":       true,
		"net.ipv4.conf.all.forwarding":        true,
		"net.ipv6.conf.default.accept_ra":     true,
		"net/ipv6/conf/eth0/accept_ra":        true,
		"net.ipv4.neigh.eth0.gc_stale_time":   true,
		"fs.net.conf.x":                       false,
	} {
		config := &runtimeapi.PodSandboxConfig{Linux: &runtimeapi.LinuxPodSandboxConfig{Sysctls: map[string]string{name: "1"}}}
		if got := needsInterfaces(config.GetLinux().GetSysctls()); got != want {
			t.Errorf("needsInterfaces(%q) = %v, want %v", name, got, want)
		}
	}
	if needsInterfaces(nil) {
		t.Error("a pod without sysctls")
	}
}

// preparing is a pod of the node's network whose pause is about to be made,
// by the real shim.
func preparing(t *testing.T) (*Store, *creation) {
	t.Helper()
	s := checker(t)
	s.options.Root, s.options.State = openDirectory(t), openDirectory(t)
	s.options.Limits.Kill = 10 * time.Second
	s.options.CgroupParent = fmt.Sprintf("/minicri-unit-%d", os.Getpid())
	var err, machineErr, shimErr error
	s.options.Hierarchies, err = cgroup.FindHierarchies()
	s.options.Machine, machineErr = machine.Read(t.TempDir())
	s.options.Shim, shimErr = filepath.Abs("../bin/minicri-shim")
	if err := errors.Join(err, machineErr, shimErr, s.installPause()); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Stat(s.options.Shim); err != nil {
		t.Fatalf("run 'make build': %v", err)
	}
	config := named("web", 0)
	config.Linux = &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
		NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE},
	}}
	sb, _, err := s.reserve(config, "", step.NewTimeline(nil))
	if err == nil {
		err = os.MkdirAll(s.Dir(sb.ID), 0o711)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		err := errors.Join(s.removeProcesses(sb.ID, sb.CgroupsPath), s.options.Hierarchies.Remove(s.options.CgroupParent, time.Second))
		if err != nil {
			t.Error(err)
		}
	})
	return s, &creation{Sandbox: sb, owner: s}
}

// openDirectory is one that processes of other users can go through.
func openDirectory(t *testing.T) string {
	t.Helper()
	directory, err := os.MkdirTemp("", "sandbox-test-")
	if err == nil {
		err = os.Chmod(directory, 0o755)
	}
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(directory) })
	return directory
}

func (c *creation) wantNoPause(t *testing.T) {
	t.Helper()
	if pids, err := c.owner.options.Hierarchies.Processes(cgroup.Path(c.CgroupsPath)); err != nil || len(pids) > 0 {
		t.Errorf("processes left in the cgroup: %v, %v", pids, err)
	}
}

func TestPauseIsReleased(t *testing.T) {
	_, c := preparing(t)
	if err := c.preparePause(t.Context()); err != nil {
		t.Fatal(err)
	}
	running, err := c.starter.release()
	if err != nil {
		t.Fatal(err)
	}
	defer running.Close()
	program, err := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", running.PID))
	if err != nil || string(program) != oci.PauseProgram+"\x00" {
		t.Errorf("process %d is %q, %v", running.PID, program, err)
	}
	if err := c.starter.abort(); err != nil {
		t.Errorf("abort after the release: %v", err)
	}
	if err := running.Kill(10 * time.Second); err != nil {
		t.Error(err)
	}
	c.wantNoPause(t)
}

func TestPauseIsAborted(t *testing.T) {
	_, c := preparing(t)
	if err := c.preparePause(t.Context()); err != nil {
		t.Fatal(err)
	}
	for range 2 {
		if err := c.starter.abort(); err != nil {
			t.Error(err)
		}
	}
	c.wantNoPause(t)
}

// A shim that was killed while pause waited for ADD is reaped as an orphan,
// because nobody waits for it yet. That is no failure to take it back.
func TestPauseIsAbortedAfterTheShimWasReaped(t *testing.T) {
	_, c := preparing(t)
	if err := c.preparePause(t.Context()); err != nil {
		t.Fatal(err)
	}
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		process.ReapOrphans(ctx)
	}()
	defer func() {
		cancel()
		<-ended
	}()
	shim := c.starter.command.Process.Pid
	deadline := time.Now().Add(20 * time.Second)
	for unix.Kill(shim, unix.SIGKILL) == nil {
		if time.Now().After(deadline) {
			t.Fatal("the shim was not reaped")
		}
		time.Sleep(50 * time.Millisecond)
	}
	if err := c.starter.abort(); err != nil {
		t.Errorf("abort: %v", err)
	}
}

// What the shim says of its failure reaches the caller.
func TestShimThatFails(t *testing.T) {
	s, c := preparing(t)
	if err := os.Remove(s.pauseProgram()); err != nil {
		t.Fatal(err)
	}
	err := c.preparePause(t.Context())
	if err == nil {
		_, err = c.starter.release()
	}
	if err == nil || !strings.Contains(err.Error(), "/pause") {
		t.Errorf("without a pause program: %v", err)
	}
	s.options.Shim = "/nowhere/minicri-shim"
	c.owner = s
	if err := c.preparePause(t.Context()); err == nil || !strings.Contains(err.Error(), "start the shim") {
		t.Errorf("without a shim: %v", err)
	}
	if err := c.starter.abort(); err != nil {
		t.Errorf("abort of what never was: %v", err)
	}
}
