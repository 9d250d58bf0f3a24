package launch_test

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/test/harness"
)

func noFilter(s *specs.Spec) { s.Linux.Seccomp = nil }

// attack: what a container can see: a container in the pid namespace of another (TARGET), with SYS_PTRACE alone, takes the socket of each process that is launched (pidfd_getfd), and says over it that a process of the node, and one of another container, are that launch's
// held: both run on; the exec fails or is done
// field: runc's init has a socket to runc, too, which reads notes of its steps from it
func TestForgedWords(t *testing.T) {
	n, c := execNode(t, noFilter)
	if out, status := command(t, "gcc", "-O2", "-static", "-Wall", "-o", n.rootfs+"/attacker", "../../test/hostile/testdata/attacker.c"); status != 0 {
		t.Fatal(out)
	}
	other := n.container(t, "other", noFilter)
	victim := exec.Command("sleep", "1000000")
	harness.Check(t, victim.Start())
	ended := make(chan error, 1)
	go func() { ended <- victim.Wait() }()
	defer func() { _ = victim.Process.Kill() }()
	output, p, trace := outputOf(t), execProcess(), []string{"CAP_SYS_PTRACE"}
	p.Args = []string{"/attacker", "forge", strconv.Itoa(victim.Process.Pid), strconv.Itoa(other.pid)}
	p.Capabilities = &specs.LinuxCapabilities{Bounding: trace, Effective: trace, Permitted: trace}
	attacker, err := c.exec(t, t.Context(), p, func(e *launch.Exec) { e.Streams[1] = output })
	harness.Check(t, err)
	defer n.end(t, attacker)
	forged := func() int { return strings.Count(read(output.Name()), "forged") }
	failed := 0
	for deadline := time.Now().Add(2 * time.Minute); forged() < 50 && time.Now().Before(deadline); {
		if l, err := c.exec(t, t.Context(), execProcess()); err == nil {
			n.end(t, l)
		} else {
			failed++
		}
	}
	if forged() < 50 {
		t.Errorf("%d words were forged: this shows nothing", forged())
	}
	t.Logf("%d words were forged, %d execs failed", forged(), failed)
	select {
	case err := <-ended:
		t.Errorf("a process of the node was ended: %v", err)
	default:
	}
	if other.init.Ended() {
		t.Error("another container was ended")
	}
}

// An exec in a frozen cgroup of version 2 ends at its limit, and nothing of it is left.
func TestExecInFrozenCgroup(t *testing.T) {
	mount := "/sys/fs/cgroup"
	if _, err := os.Stat(mount + "/unified"); err == nil {
		mount += "/unified"
	}
	if _, err := os.Stat(mount + "/cgroup.controllers"); err != nil {
		t.Skip("no hierarchy of version 2")
	}
	n, c := execNode(t, noFilter)
	dir := filepath.Join(mount, fmt.Sprintf("minicri-launch-%d-frozen", os.Getpid()))
	freeze := func(value string) error { return os.WriteFile(dir+"/cgroup.freeze", []byte(value), 0) }
	harness.Check(t, errors.Join(os.Mkdir(dir, 0o755), freeze("1")))
	defer eventually(t, "the cgroup can be removed", func() bool { return os.Remove(dir) == nil })
	ctx, cancel := context.WithTimeout(t.Context(), 3*time.Second)
	defer cancel()
	into := func(e *launch.Exec) { e.Cgroups = map[string]string{"": dir} }
	if _, err := c.exec(t, ctx, execProcess(), into); !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "waiting for its helper in the cgroup of the container") {
		t.Error(err)
	}
	harness.Check(t, freeze("0"))
	// A helper that had no time to say its pid ends when it can.
	eventually(t, "nothing is left there", func() bool { return read(dir+"/cgroup.procs") == "" })
	l, err := c.exec(t, t.Context(), execProcess(), into)
	harness.Check(t, err)
	eventually(t, "the process is alone there", func() bool {
		return strings.TrimSpace(read(dir+"/cgroup.procs")) == strconv.Itoa(l.Child.PID)
	})
	n.end(t, l)
}
