package process

import (
	"errors"
	"os"
	"os/exec"
	"testing"
	"time"
)

// within is far more than anything here takes, also under the race detector on a busy machine.
const within = time.Minute

// A pid whose start time is another one belongs to another process by now.
func TestFactsNameOneProcess(t *testing.T) {
	facts := start(t, exec.Command("sleep", "60"))
	if p := open(t, facts); p.Facts != facts {
		t.Errorf("opened %+v, want %+v", p.Facts, facts)
	}
	facts.StartTime++
	if _, err := Open(facts); !errors.Is(err, ErrGone) {
		t.Errorf("Open = %v, want ErrGone", err)
	}
	for _, pid := range []int{0, -1, 1 << 30} {
		if _, err := Open(Facts{PID: pid, StartTime: 1}); !errors.Is(err, ErrGone) {
			t.Errorf("Open of pid %d = %v, want ErrGone", pid, err)
		}
	}
}

func TestCloseEndsWait(t *testing.T) {
	p, err := Open(start(t, exec.Command("sleep", "60")))
	must(t, err)
	waited := make(chan error, 1)
	go func() { waited <- p.Wait() }()
	time.Sleep(20 * time.Millisecond)
	must(t, p.Close())
	if err := <-waited; err == nil {
		t.Error("Wait says that the process ended, but the handle was only closed")
	}
	if stat, err := ReadStat(p.PID); err != nil || stat.Dead() {
		t.Errorf("the process did not survive Close: %+v, %v", stat, err)
	}
}

// A process that has ended and was not reaped yet is gone, and stays openable unknown after it was reaped.
func TestReap(t *testing.T) {
	command := exec.Command("cat")
	stdin, err := command.StdinPipe()
	must(t, err)
	p := open(t, start(t, command))
	if p.Reap(); !exists(p.PID) {
		t.Fatal("Reap took a process that runs")
	}
	must(t, errors.Join(stdin.Close(), p.Wait()))
	if stat, err := ReadStat(p.PID); err != nil || !stat.Dead() {
		t.Fatalf("before Reap: %+v, %v, want a zombie", stat, err)
	}
	if _, err := Open(p.Facts); !errors.Is(err, ErrGone) {
		t.Errorf("Open of a zombie = %v, want ErrGone", err)
	}
	p.Reap()
	if exists(p.PID) {
		t.Error("still there after Reap")
	}
	p.Reap()
	if err := p.Wait(); err != nil {
		t.Errorf("Wait after Reap = %v", err)
	}
}

func TestKill(t *testing.T) {
	p := open(t, start(t, exec.Command("sh", "-c", "trap '' TERM INT HUP; while :; do sleep 60; done")))
	for range 2 { // the second time it is gone already
		must(t, p.Kill(within))
	}
	if exists(p.PID) {
		t.Error("still there after Kill")
	}
}

// Kill cannot reap what is another one's child, and is done all the same.
func TestKillAnothersChild(t *testing.T) {
	parent := exec.Command("sh", "-c", "sleep 60 & echo $!; exec tail -f /dev/null")
	child := startWithPID(t, parent)
	p := open(t, child)
	must(t, p.Kill(within))
	if stat, err := ReadStat(child.PID); err != nil || !stat.Dead() {
		t.Errorf("%+v, %v: want a zombie that its parent does not reap", stat, err)
	}
}

// The name of a process may look like the fields that follow it.
func TestReadStatOfAnOddName(t *testing.T) {
	sleep, err := exec.LookPath("sleep")
	must(t, err)
	odd := t.TempDir() + "/) Z 1 (x"
	data, err := os.ReadFile(sleep)
	must(t, errors.Join(err, os.WriteFile(odd, data, 0o755)))
	facts := start(t, exec.Command(odd, "60"))
	stat, err := ReadStat(facts.PID)
	if err != nil || stat.Dead() || stat.Parent != os.Getpid() || stat.StartTime == 0 {
		t.Errorf("ReadStat = %+v, %v", stat, err)
	}
	if _, err := ReadStat(1 << 30); !errors.Is(err, ErrGone) {
		t.Errorf("ReadStat of a process that is not there = %v, want ErrGone", err)
	}
}

// start starts a child that ends with the test at the latest.
func start(t *testing.T, command *exec.Cmd) Facts {
	t.Helper()
	must(t, command.Start())
	t.Cleanup(func() {
		_ = command.Process.Kill()
		_ = command.Wait() // an error where the test has reaped it
	})
	return factsOf(t, command.Process.Pid)
}

// startWithPID starts a command that prints the pid of a child of its own.
func startWithPID(t *testing.T, command *exec.Cmd) Facts {
	t.Helper()
	output, err := command.StdoutPipe()
	must(t, err)
	start(t, command)
	return factsOf(t, readPID(t, output))
}

func factsOf(t *testing.T, pid int) Facts {
	t.Helper()
	stat, err := ReadStat(pid)
	must(t, err)
	return Facts{PID: pid, StartTime: stat.StartTime}
}

func open(t *testing.T, facts Facts) *Process {
	t.Helper()
	p, err := Open(facts)
	must(t, err)
	t.Cleanup(func() { _ = p.Close() })
	return p
}

func exists(pid int) bool {
	_, err := ReadStat(pid)
	return err == nil
}

// must ends the test for an error.
func must(t testing.TB, err error) {
	t.Helper()
	if err != nil {
		t.Fatal(err)
	}
}
