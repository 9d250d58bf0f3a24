package container

import (
	"fmt"
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// cri: ContainerConfig.stop_signal ContainerStatus.stop_signal
func TestStopSignal(t *testing.T) {
	p := newPod(t)
	// That of the image, or what the request says.
	for signal, code := range map[runtimeapi.Signal]int32{runtimeapi.Signal_SIGNAL_SIGUSR1: 10, runtimeapi.Signal_SIGNAL_SIGTERM: 15} {
		id := p.run(fmt.Sprint("exits-", code), forever, func(c *runtimeapi.ContainerConfig) {
			if code == 15 {
				c.StopSignal = signal
			}
		})
		p.awaitLine(id, "ready")
		same(t, "stop signal", p.status(id).StopSignal.String(), signal.String())
		check(t, p.stop(id, 10))
		p.wantExit(id, code, "Error")
	}
}

// deaf is a script that no signal but SIGKILL ends, with a child of its own.
const deaf = "trap '' TERM USR1; sleep 1000 & echo ready; while true; do sleep 0.02; done"

// heedless is a script that says when it is told to end, and does not.
const heedless = "trap 'echo told' TERM USR1; echo ready; while true; do sleep 0.02; done"

// cri: StopContainer StopContainerRequest.timeout
func TestStopKillsAfterTheGrace(t *testing.T) {
	p := newPod(t)
	for seconds, name := range []string{"at-once", "after-a-second"} {
		id := p.run(name, deaf)
		p.awaitLine(id, "ready")
		began := time.Now()
		check(t, p.stop(id, int64(seconds)))
		if took := time.Since(began); took < time.Duration(seconds)*time.Second || took > time.Duration(seconds)*time.Second+15*time.Second {
			t.Errorf("%s: stopped after %v", name, took)
		}
		p.wantExit(id, 137, "Error")
		eventually(t, "no process is left", func() bool { return len(p.inCgroup(p.info(id).CgroupsPath)) == 0 })
	}
}

func TestP40_ShorterGraceWins(t *testing.T) {
	p := newPod(t)
	id := p.run("app", heedless)
	p.awaitLine(id, "ready")
	first := make(chan error, 1)
	go func() { first <- p.stop(id, 3600) }()
	p.awaitLine(id, "told")
	began := time.Now()
	check(t, p.stop(id, 0))
	check(t, <-first)
	if took := time.Since(began); took > patience {
		t.Errorf("stopped after %v", took)
	}
	p.wantExit(id, 137, "Error")
}
