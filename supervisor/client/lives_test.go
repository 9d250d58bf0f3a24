package client_test

import (
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
)

// One supervisor that has had many containers, each with a command, is as it was
// before: descriptors, threads, and on disk.
func TestManyLives(t *testing.T) {
	lives := 20
	if os.Getenv("MINICRI_TEST_WHOLE") != "" {
		lives = 1000
	}
	p := startPod(t)
	bundle := p.bundle("again", "sleep 1000")
	life := func() {
		if _, err := p.Create(t.Context(), bundle); err != nil {
			t.Fatal(err)
		}
		if err := p.Start(t.Context(), "again"); err != nil {
			t.Fatal(err)
		}
		if r, err := p.ExecSync(t.Context(), "again", sh("true"), time.Minute, 100); err != nil || r.Code != 0 {
			t.Fatalf("exec: %+v, %v", r, err)
		}
		if err := p.Delete(t.Context(), "again", true); err != nil {
			t.Fatal(err)
		}
	}
	for range 10 {
		life()
	}
	pid := p.pid()
	before := p.holds(pid)
	for range lives {
		life()
	}
	var now held
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(20 * time.Millisecond) {
		if now = p.holds(pid); now.within(before) || time.Now().After(deadline) {
			break
		}
	}
	t.Logf("after %d lives: %+v, %d threads", lives, now, count(t, fmt.Sprintf("/proc/%d/task", pid)))
	if !now.within(before) {
		t.Errorf("after %d lives the supervisor has %+v, before %+v", lives, now, before)
	}
	if threads := count(t, fmt.Sprintf("/proc/%d/task", pid)); threads > 24 {
		t.Errorf("it has %d threads", threads)
	}
}

// held is what a supervisor has.
type held struct{ descriptors, records, fifos, exits, states int }

// within reports whether nothing is more than it was before, when something may have
// been about to go.
func (h held) within(before held) bool {
	return h.descriptors <= before.descriptors && h.records <= before.records && h.fifos <= before.fifos &&
		h.exits <= before.exits && h.states <= before.states
}

func (p *pod) holds(pid int) held {
	p.t.Helper()
	return held{
		count(p.t, fmt.Sprintf("/proc/%d/fd", pid)), count(p.t, p.dir+"/records"), count(p.t, p.dir+"/io"),
		count(p.t, p.dir+"/exits"), count(p.t, p.dir+"/containers"),
	}
}

func count(t testing.TB, dir string) int {
	t.Helper()
	entries, err := os.ReadDir(dir)
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

// A supervisor that is killed while it makes a container leaves nothing of it to
// the next one: neither its fifos, which come first, nor its state.
func TestCreateThatWasCutOff(t *testing.T) {
	p := startPod(t)
	p.run("lives", "sleep 1000")
	for _, stream := range []string{"stdout", "stderr"} {
		if err := unix.Mkfifo(filepath.Join(p.dir, "io", "cut."+stream), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for name, content := range map[string]string{"lives.json.new": "", "begun.json": `{"id": "begun", "version": 1}`} {
		if err := os.WriteFile(filepath.Join(p.dir, "records", name), []byte(content), 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(p.dir, "containers", "begun"), 0o700); err != nil {
		t.Fatal(err)
	}
	p.killShim()
	reapOrphans()
	p.restart()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) { // it serves first
		fifos, states, records := count(t, p.dir+"/io"), count(t, p.dir+"/containers"), count(t, p.dir+"/records")
		if fifos == 4 && states == 1 && records == 1 {
			break
		}
		if time.Now().After(deadline) {
			t.Fatalf("%d fifos and spools, %d states and %d files of records for one container", fifos, states, records)
		}
	}
}

// Whatever an exec has started ends with it, at whatever moment it is ended.
func TestExecsAreEndedWithAllTheyStart(t *testing.T) {
	p := startPod(t)
	p.run("c", "sleep 1000")
	ctx := t.Context()
	for i := range 300 {
		id := fmt.Sprint("e", i)
		if err := p.ExecStart(ctx, "c", id, sh("sleep 1000 & sleep 1000"), true); err != nil {
			t.Fatal(err)
		}
		time.Sleep(rand.N(3 * time.Millisecond))
		if err := p.ExecKill(ctx, "c", id, 9, true); err != nil {
			t.Error(err)
		}
		if _, err := p.ExecWait(ctx, "c", id); err != nil {
			t.Error(err)
		}
	}
	var left []string
	for deadline := time.Now().Add(time.Minute); time.Now().Before(deadline); {
		if left = p.processes("c"); len(left) == 1 {
			return
		}
		time.Sleep(20 * time.Millisecond)
	}
	t.Errorf("left: %d processes of 300 execs", len(left)-1)
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

// The start of a container is on disk before its program runs: where it cannot be
// written, the program does not run.
func TestStartIsOnDiskBeforeTheProgramRuns(t *testing.T) {
	p := startPod(t)
	p.create("c", "echo ran; sleep 1000")
	inTheWay := filepath.Join(p.dir, "records", "c.json.new")
	if err := os.Mkdir(inTheWay, 0o700); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(t.Context(), "c"); err == nil {
		t.Error("a start that is not on disk succeeded")
	}
	time.Sleep(200 * time.Millisecond)
	if s, err := p.state(t.Context(), "c"); err != nil || s.Status != api.Status_STATUS_CREATED || s.StartedAt != 0 {
		t.Errorf("after a start that failed: %v, %v", s, err)
	}
	if said := p.log("c"); said != "" {
		t.Errorf("its program ran: %q", said)
	}
	if err := os.RemoveAll(inTheWay); err != nil {
		t.Fatal(err)
	}
	if err := p.Start(t.Context(), "c"); err != nil {
		t.Error(err)
	}
	p.awaitInLog("c", " ran\n")
}
