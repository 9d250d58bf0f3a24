package client_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// byRuntime is how a container is made by each kind of runtime; the programs are
// those that hack/unpack has unpacked.
func byRuntime(t *testing.T) map[string]func(*specs.Spec, *api.CreateRequest) {
	t.Helper()
	kinds := map[string]func(*specs.Spec, *api.CreateRequest){"builtin": func(*specs.Spec, *api.CreateRequest) {}}
	program, err := exec.LookPath("runc")
	if err != nil {
		t.Fatalf("bin/debian/usr/bin has to be in PATH, as hack/test has it: %v", err)
	}
	kinds["runc"] = func(_ *specs.Spec, r *api.CreateRequest) { r.Runtime = []string{program} }
	return kinds
}

func lives(pid uint32) bool {
	stat, err := os.ReadFile(fmt.Sprintf("/proc/%d/stat", pid))
	_, rest, _ := strings.Cut(string(stat), ") ")
	return err == nil && !strings.HasPrefix(rest, "Z")
}

// Whatever a successor has too few descriptors for costs no container its life; the
// next one, which has enough, serves them.
func TestAdoptionWithoutDescriptors(t *testing.T) {
	p := startPod(t)
	pids := map[string]uint32{}
	for kind, change := range byRuntime(t) {
		pids[kind] = uint32(p.run(strings.ReplaceAll(kind, "-", ""), "while true; do echo hi; sleep 0.01; done", change).Pid)
	}
	p.killShim()
	reapOrphans()
	for limit := 5; limit < 60; limit += 3 {
		p.startStarved(limit)
		for kind, pid := range pids {
			if !lives(pid) {
				t.Fatalf("with %d descriptors the successor has ended the container of %s", limit, kind)
			}
		}
	}
	p.restart()
	for kind := range pids {
		id := strings.ReplaceAll(kind, "-", "")
		if s, err := p.state(t.Context(), id); err != nil || s.GetStatus() != api.Status_STATUS_RUNNING {
			t.Errorf("%s: %v, %v", kind, s, err)
		}
	}
}

// startStarved runs a successor that may have so many descriptors, until it serves or
// ends, and kills it.
func (p *pod) startStarved(descriptors int) {
	p.t.Helper()
	ready, theirs, err := os.Pipe()
	if err != nil {
		p.t.Fatal(err)
	}
	defer ready.Close()
	command := exec.Command("sh", "-c", fmt.Sprintf(`ulimit -n %d; exec %s serve --dir %s --build x --ready-fd 3 2>/dev/null`, descriptors, shimBinary, p.dir))
	command.ExtraFiles = []*os.File{theirs}
	err = errors.Join(command.Start(), theirs.Close())
	if err != nil {
		p.t.Fatal(err)
	}
	_ = ready.SetReadDeadline(time.Now().Add(time.Minute))
	words := make([]byte, 16)
	if n, _ := ready.Read(words); n > 0 {
		time.Sleep(50 * time.Millisecond) // it adopts on, in the background
	}
	_ = command.Process.Kill()
	_ = command.Wait() // it was killed, or has ended by itself
}

// awaitInLog waits until the log of a container has the words.
func (p *pod) awaitInLog(id, words string) {
	p.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(5 * time.Millisecond) {
		log, err := os.ReadFile(p.logPath(id))
		if err == nil && strings.Contains(string(log), words) {
			return
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("no %q in the log: %s, %v", words, log, err)
		}
	}
}

// The exit code of an adopted container is known also when its parent, which a busy
// machine holds up, comes late to reap it.
func TestAdoptedInitThatIsReapedLate(t *testing.T) {
	if !hasExitInfo() {
		t.Log("this kernel keeps no exit codes: the daemon reports them")
		return
	}
	p := startPod(t)
	pid := int(p.run("c", "exec sleep 1000").Pid) // not sh: that is reaped by reapOrphans
	for comm := []byte(nil); string(comm) != "sleep\n"; time.Sleep(5 * time.Millisecond) {
		comm, _ = os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	}
	p.killShim()
	p.restart()
	if err := syscall.Kill(pid, syscall.SIGKILL); err != nil {
		t.Fatal(err)
	}
	time.Sleep(4 * time.Second)
	if reaped, err := syscall.Wait4(pid, nil, 0, nil); err != nil || reaped != pid {
		t.Fatalf("wait for the container: %d, %v", reaped, err)
	}
	if e := p.awaitExit(t.Context(), "c").Exit; !e.CodeKnown || e.Code != 137 {
		t.Errorf("exit: %v", e)
	}
}
