package client_test

import (
	"fmt"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
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
	var now string
	for deadline := time.Now().Add(20 * time.Second); ; time.Sleep(20 * time.Millisecond) {
		if now = p.holds(pid); now == before || time.Now().After(deadline) {
			break
		}
	}
	t.Logf("after %d lives: %s, %d threads", lives, now, count(t, fmt.Sprintf("/proc/%d/task", pid)))
	if now != before {
		t.Errorf("after %d lives the supervisor has %s, before %s", lives, now, before)
	}
	if threads := count(t, fmt.Sprintf("/proc/%d/task", pid)); threads > 24 {
		t.Errorf("it has %d threads", threads)
	}
}

// holds counts what a supervisor has.
func (p *pod) holds(pid int) string {
	p.t.Helper()
	return fmt.Sprintf("%d descriptors, %d records, %d fifos, %d exits, %d states", count(p.t, fmt.Sprintf("/proc/%d/fd", pid)),
		count(p.t, p.dir+"/records"), count(p.t, p.dir+"/io"), count(p.t, p.dir+"/exits"), count(p.t, p.dir+"/containers"))
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
	for _, name := range []string{"lives.json.new", "left.copy"} {
		if err := os.WriteFile(filepath.Join(p.dir, "records", name), nil, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	if err := os.Mkdir(filepath.Join(p.dir, "containers", "begun"), 0o700); err != nil {
		t.Fatal(err)
	}
	p.killShim()
	reapOrphans()
	p.restart()
	if fifos, states, records := count(t, p.dir+"/io"), count(t, p.dir+"/containers"), count(t, p.dir+"/records"); fifos != 2 || states != 1 || records != 2 {
		t.Errorf("%d fifos, %d states and %d files of records for one container", fifos, states, records)
	}
}
