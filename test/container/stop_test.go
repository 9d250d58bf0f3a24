package container

import (
	"testing"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// cri: ContainerConfig.stop_signal ContainerStatus.stop_signal
func TestStopSignal(t *testing.T) {
	p := newPod(t)
	id := p.run("image", forever)
	p.awaitLine(id, "ready")
	if s := p.status(id).StopSignal; s != runtimeapi.Signal_SIGNAL_SIGUSR1 {
		t.Errorf("stop signal of the image: %v", s)
	}
	check(t, p.stop(id, 10))
	p.wantExit(id, 10, "Error")
	id = p.run("request", forever, func(c *runtimeapi.ContainerConfig) { c.StopSignal = runtimeapi.Signal_SIGNAL_SIGTERM })
	p.awaitLine(id, "ready")
	check(t, p.stop(id, 10))
	p.wantExit(id, 15, "Error")
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

// cri: ContainerStatus.finished_at
func TestStopOfACreatedContainer(t *testing.T) {
	p := newPod(t)
	id := p.create(shell("app", "true"))
	check(t, p.stop(id, 10))
	if s := p.status(id); s.State != exited || s.FinishedAt == 0 {
		t.Errorf("stopped before its start: %v", s)
	}
	check(t, p.remove(id))
}
