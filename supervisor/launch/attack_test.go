package launch_test

import (
	"os/exec"
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
	out, status := command(t, "gcc", "-O2", "-static", "-Wall", "-o", n.rootfs+"/attacker", "../../test/hostile/testdata/attacker.c")
	harness.Want(t, status == 0, "%v", out)
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
	harness.Want(t, forged() >= 50, "%d words were forged: this shows nothing", forged())
	t.Logf("%d words were forged, %d execs failed", forged(), failed)
	select {
	case err := <-ended:
		t.Errorf("a process of the node was ended: %v", err)
	default:
	}
	harness.Want(t, !other.init.Ended(), "another container was ended")
}
