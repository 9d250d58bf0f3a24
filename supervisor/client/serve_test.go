package client_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

// A successor serves without what it needs for single containers alone, such as the
// states of libcontainer: with hundreds of them, to read them takes longer than all
// else. Here a read of one does not come to its end.
func TestServesBeforeStatesAreRead(t *testing.T) {
	p := startPod(t)
	p.run("c", "echo hi; sleep 1000")
	p.killShim()
	reapOrphans()
	state := filepath.Join(p.dir, "containers", "c", "state.json")
	if err := os.Rename(state, state+".aside"); err != nil {
		t.Fatal(err)
	}
	if err := unix.Mkfifo(state, 0o600); err != nil {
		t.Fatal(err)
	}
	p.restart()
	if s, err := p.state(t.Context(), "c"); err != nil || s.Exit != nil || !s.Adopted {
		t.Errorf("a container whose state is not read: %v, %v", s, err)
	}
	if err := os.Rename(state+".aside", state); err != nil {
		t.Fatal(err)
	}
	if r, err := p.ExecSync(t.Context(), "c", sh("echo hi"), 0, 10); err != nil || string(r.Stdout) != "hi\n" {
		t.Errorf("exec: %+v, %v", r, err)
	}
}

// A command that is run as soon as the successor serves is none of those that it ends,
// whose callers have gone with its predecessor.
func TestExecsBesideTheirAdoption(t *testing.T) {
	p := startPod(t)
	const count, waits = 5, "while :; do sleep 1; done" // a shell, which reapOrphans reaps
	for i := range count {
		p.run(fmt.Sprint("c", i), waits)
	}
	for range 3 {
		for i := range count {
			if err := p.ExecStart(t.Context(), fmt.Sprint("c", i), "left", sh(waits), false); err != nil {
				t.Fatal(err)
			}
		}
		p.killShim()
		reapOrphans()
		p.restart()
		for i := range count {
			id := fmt.Sprint("c", count-1-i)
			r, err := p.ExecSync(t.Context(), id, sh("sleep 0.2; echo done"), time.Minute, 100)
			if err != nil || r.Code != 0 || string(r.Stdout) != "done\n" {
				t.Errorf("a command of %s: %+v, %v", id, r, err)
			}
			for deadline := time.Now().Add(time.Minute); p.shells(id) != 1; time.Sleep(10 * time.Millisecond) { // the container's own
				if time.Now().After(deadline) {
					t.Fatalf("a command of before still runs in %s: %d shells", id, p.shells(id))
				}
			}
		}
	}
}

// shells counts the shells in a container's cgroups.
func (p *pod) shells(id string) (count int) {
	for _, pid := range p.processes(id) {
		if name, _ := os.ReadFile("/proc/" + pid + "/comm"); string(name) == "sh\n" {
			count++
		}
	}
	return count
}
