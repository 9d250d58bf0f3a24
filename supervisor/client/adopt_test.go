package client_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"os/exec"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
	"github.com/minicri/minicri/test/harness"
)

// stays is a script whose shell reapOrphans reaps.
const stays = "while :; do sleep 1; done"

// processState is that of a process: S, D, Z; "" of one that is gone.
func processState[T any](pid T) string {
	stat, _ := os.ReadFile(fmt.Sprintf("/proc/%v/stat", pid))
	_, rest, _ := strings.Cut(string(stat), ") ")
	return rest[:min(1, len(rest))]
}

// Whatever a successor has too few descriptors for costs no container its life, of any kind
// of runtime; the next one, which has enough, serves them.
func TestAdoptionWithoutDescriptors(t *testing.T) {
	runc, err := exec.LookPath("runc") // which hack/unpack has unpacked
	harness.Check(t, err)
	p, pids := startPod(t), map[string]int32{}
	for id, program := range harness.Sorted(map[string][]string{"builtin": nil, "runc": {runc}}) {
		pids[id] = p.run(id, "while true; do echo hi; sleep 0.01; done", func(_ *specs.Spec, r *api.CreateRequest) { r.Runtime = program }).Pid
	}
	p.killShim()
	reapOrphans()
	for limit := 5; limit < 60; limit += 3 {
		p.startStarved(limit)
		for id, pid := range pids {
			now := processState(pid)
			harness.Need(t, now != "" && now != "Z", "with %d descriptors the successor has ended the container of %s", limit, id)
		}
	}
	p.restart()
	for id := range pids {
		s, err := p.state(t.Context(), id)
		harness.Want(t, err == nil && s.GetStatus() == api.Status_STATUS_RUNNING, "%s: %v, %v", id, s, err)
	}
}

// startStarved runs a successor that may have so many descriptors, until it serves or ends, and kills it.
func (p *pod) startStarved(descriptors int) {
	ready, theirs, err := os.Pipe()
	p.check(err)
	defer ready.Close()
	command := exec.Command("sh", "-c", fmt.Sprintf(`ulimit -n %d; exec %s serve --dir %s --build x --ready-fd 3 2>/dev/null`, descriptors, shimBinary, p.dir))
	command.ExtraFiles = []*os.File{theirs}
	p.check(errors.Join(command.Start(), theirs.Close()))
	if n, _ := ready.Read(make([]byte, 16)); n > 0 {
		if c, err := client.Connect(p.t.Context(), p.dir, new(atomic.Int64)); err == nil { // it adopts on, in the background
			_, _ = c.List(p.t.Context())
			_ = c.Close()
		}
	}
	_ = command.Process.Kill()
	_ = command.Wait() // it was killed, or has ended by itself
}

// The exit code of an adopted container is known also when its parent, which a busy
// machine holds up, comes late to reap it.
func TestAdoptedInitThatIsReapedLate(t *testing.T) {
	if !harness.KernelTellsExits() {
		t.Log("this kernel keeps no exit codes: the daemon reports them")
		return
	}
	p := startPod(t)
	pid := int(p.run("c", "exec sleep 1000").Pid) // not sh: that is reaped by reapOrphans
	p.awaitFile(fmt.Sprintf("/proc/%d/comm", pid), "sleep\n")
	p.succeed()
	p.check(syscall.Kill(pid, syscall.SIGKILL))
	p.eventually("it is a zombie", func() bool { return processState(pid) == "Z" })
	reaped, err := syscall.Wait4(pid, nil, 0, nil)
	harness.Want(t, err == nil && reaped == pid, "wait for the container: %d, %v", reaped, err)
	e := p.awaitExit(t.Context(), "c").Exit
	harness.Want(t, e.CodeKnown && e.Code == 137, "exit: %v", e)
}

// A supervisor that is killed while it makes a container leaves nothing of it to
// the next one: neither its fifos, which come first, nor its state.
func TestCreateThatWasCutOff(t *testing.T) {
	p := startPod(t)
	p.run("lives", "sleep 1000")
	p.check(errors.Join(
		unix.Mkfifo(p.dir+"/io/cut.stdout", 0o600), unix.Mkfifo(p.dir+"/io/cut.stderr", 0o600), os.Mkdir(p.dir+"/containers/begun", 0o700),
		os.WriteFile(p.dir+"/records/lives.json.new", nil, 0o600),
		os.WriteFile(p.dir+"/records/begun.json", []byte(`{"id": "begun", "version": 1}`), 0o600),
	))
	p.succeed()
	p.eventually("4 fifos and spools, one state and one record are left", func() bool { // it serves first
		return count(t, p.dir+"/io") == 4 && count(t, p.dir+"/containers") == 1 && count(t, p.dir+"/records") == 1
	})
}

// The start of a container is on disk before its program runs: where it cannot be written, the program does not run.
func TestStartIsOnDiskBeforeTheProgramRuns(t *testing.T) {
	p := startPod(t)
	p.create("c", "echo ran; sleep 1000")
	inTheWay := p.dir + "/records/c.json.new"
	p.check(os.Mkdir(inTheWay, 0o700))
	harness.Want(t, p.Start(t.Context(), "c") != nil, "a start that is not on disk succeeded")
	s, err := p.state(t.Context(), "c")
	harness.Need(t, err == nil, "after a start that failed: %v, %v", s, err)
	harness.Want(t, s.Status == api.Status_STATUS_CREATED, "after a start that failed: %v, %v", s, err)
	harness.Want(t, s.StartedAt == 0, "after a start that failed: %v, %v", s, err)
	p.check(os.RemoveAll(inTheWay))
	p.check(p.Start(t.Context(), "c"))
	p.awaitFile(p.logPath("c"), " ran\n")
	harness.Same(t, "how often its program ran", strings.Count(p.log("c"), "ran"), 1)
}

// Whatever an exec has started ends with it, at whatever moment its client goes, also while it is being started. One with
// a cgroup of its own ends with what has detached itself, too.
func TestExecsAreEndedWithAllTheyStart(t *testing.T) {
	p := startPod(t)
	p.run("c", "sleep 1000")
	scripts := map[bool]string{false: "sleep 1000 & sleep 1000", true: "(sleep 1000 &) ; sleep 1000 & sleep 1000"}
	for i := range 300 {
		apart := i%2 == 0
		if i%10 < 2 {
			leaves, leave := context.WithTimeout(t.Context(), rand.N(3*time.Millisecond))
			e, err := p.Exec(leaves, client.ExecOptions{Container: "c", Process: sh(scripts[apart]), Apart: apart})
			if err == nil {
				e.End(time.Minute)
			}
			leave()
			continue
		}
		e := p.exec("c", scripts[apart], apart)
		time.Sleep(rand.N(3 * time.Millisecond))
		e.End(time.Minute)
	}
	p.eventually("no process of the execs is left", func() bool { return len(p.processes("c")) == 1 })
}

// A command that is run as soon as the successor serves is none of those that it ends,
// whose callers have gone with its predecessor.
func TestExecsBesideTheirAdoption(t *testing.T) {
	p := startPod(t)
	const count = 5
	for i := range count {
		p.run(fmt.Sprint("c", i), stays)
	}
	for range 3 {
		for i := range count {
			defer p.exec(fmt.Sprint("c", i), stays, i%2 == 0).Close()
		}
		p.succeed()
		for i := range count {
			id := fmt.Sprint("c", count-1-i)
			p.wantExec(id, "sleep 0.2; echo done", "done\n")
			p.eventually("the container's own shell is left in "+id, func() bool { return p.shells(id) == 1 })
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

// One supervisor that has had many containers, each with a command, is as it was
// before: descriptors, threads, and on disk.
func TestManyLives(t *testing.T) {
	lives := 20
	if os.Getenv("MINICRI_TEST_WHOLE") != "" {
		lives = 1000
	}
	p := startPod(t)
	bundle := p.bundle("again", "sleep 1000")
	live := func(times int) {
		for range times {
			_, err := p.Create(t.Context(), bundle)
			p.check(errors.Join(err, p.Start(t.Context(), "again")))
			p.wantExec("again", "true", "")
			p.check(p.Delete(t.Context(), "again", true))
		}
	}
	proc := fmt.Sprintf("/proc/%d", p.pid())
	// holds are numbers of what a supervisor has, which may not grow.
	holds := func() (all []int) {
		for _, dir := range []string{proc + "/fd", p.dir + "/records", p.dir + "/io", p.dir + "/exits", p.dir + "/containers"} {
			all = append(all, count(t, dir))
		}
		return all
	}
	live(10)
	before := holds()
	live(lives)
	p.eventually(fmt.Sprintf("after %d lives the supervisor has no more than %v", lives, before), func() bool {
		for i, now := range holds() {
			if now > before[i] {
				return false
			}
		}
		return true
	})
	threads := count(t, proc+"/task")
	harness.Want(t, threads <= 24, "it has %d threads", threads)
}

func count(t testing.TB, dir string) int {
	entries, err := os.ReadDir(dir)
	harness.Check(t, err)
	return len(entries)
}
