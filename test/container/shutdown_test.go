package container

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/grpc/codes"

	"github.com/minicri/minicri/test/harness"
)

// A daemon that is stopped does not wait for what its clients can ask of the
// next one: the grace of a container that ignores its signal, a command that
// runs on. The calls are answered, and nothing happens to the container.
//
// cri: ExecSyncResponse.exit_code
func TestShutdownCancelsWaits(t *testing.T) {
	n := newNode(t, harness.Config("[limits]\nshutdown = '50s'\ncreate = '50s'"))
	p := runPod(t, n, "web")
	id := p.run("app", deaf)
	p.awaitLine(id, "ready")
	pid := p.info(id).PID
	answers := make(chan error, 2)
	go func() { answers <- p.stop(id, 1000) }()
	go func() {
		_, err := p.tryExec(id, 0, "/bin/sh", "-c", "echo here > /began; exec tail -f /dev/null")
		answers <- err
	}()
	eventually(t, "the command runs", func() bool {
		answer, err := p.tryExec(id, 0, "/bin/cat", "/began")
		return err == nil && answer.ExitCode == 0
	})
	began := time.Now()
	n.Stop()
	took := time.Since(began)
	// It takes some milliseconds; with its calls it would take the 50 seconds of its limit.
	if took > 15*time.Second {
		t.Errorf("the daemon took %v to end", took)
	}
	for range 2 {
		wantCode(t, <-answers, codes.Unavailable)
	}
	n.Start()
	fmt.Printf("SIGTERM beside StopContainer's grace and ExecSync: ended after %v, served again after %v\n",
		took.Round(time.Millisecond), time.Since(began).Round(time.Millisecond))
	if now := p.status(id); now.State != running || p.info(id).PID != pid {
		t.Errorf("the container is %v", now)
	}
	eventually(t, "nothing is left of the command", func() bool { return !slices.Contains(p.tree(id), "tail") })
	check(t, p.stop(id, 0))
	p.wantExit(id, 137, "Error")
}

// A container that is being made when the daemon is stopped is undone, and the caller
// is told to ask the next daemon.
//
// cri: CreateContainerRequest.config
func TestShutdownDuringCreate(t *testing.T) {
	p := newPod(t)
	out := t.TempDir()
	config := shell("app", forever, hooked(t, harness.Hook{Kind: "createRuntime", Script: "touch " + out + "/began; exec sleep 1000"}))
	answer := make(chan error, 1)
	go func() {
		_, err := p.tryCreate(config)
		answer <- err
	}()
	eventually(t, "the hook runs", func() bool { _, err := os.Stat(filepath.Join(out, "began")); return err == nil })
	p.Stop()
	err := <-answer
	wantCode(t, err, codes.Unavailable)
	if err == nil || !strings.Contains(err.Error(), "shutting down") {
		t.Errorf("the error does not say why: %v", err)
	}
	p.Start()
	if left := p.list(nil); len(left) != 0 {
		t.Errorf("left: %v", left)
	}
}
