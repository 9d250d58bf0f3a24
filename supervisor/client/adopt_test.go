package client_test

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
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

// startVia starts a successor by a shell script, to whose arguments it is given.
func (p *pod) startVia(script string) {
	p.t.Helper()
	path := filepath.Join(p.t.TempDir(), "shim")
	if err := os.WriteFile(path, []byte("#!/bin/sh\n"+script+"\n"), 0o700); err != nil {
		p.t.Fatal(err)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		successor, err := client.Start(p.t.Context(), client.StartOptions{Binary: path, Dir: p.dir})
		if err == nil {
			_ = p.Close()
			p.Client = successor
			return
		}
		if !errdefs.IsAlreadyExists(err) || time.Now().After(deadline) {
			p.t.Fatal(err)
		}
	}
}

// A successor that cannot read what the kernel says of a process takes its container
// for what it was, and knows as soon as it can be read.
func TestAdoptionWhenProcessesCannotBeRead(t *testing.T) {
	p := startPod(t)
	pids := map[string]uint32{}
	var cover, uncover strings.Builder
	garbage := filepath.Join(t.TempDir(), "garbage")
	if err := os.WriteFile(garbage, []byte("?"), 0o600); err != nil {
		t.Fatal(err)
	}
	for _, id := range []string{"runs", "ends"} {
		pids[id] = uint32(p.run(id, "trap 'exit 7' TERM; while true; do sleep 0.01; done").Pid)
		fmt.Fprintf(&cover, "mount --bind %s /proc/%d/stat; ", garbage, pids[id])
		fmt.Fprintf(&uncover, "umount /proc/%d/stat; ", pids[id])
	}
	p.killShim()
	reapOrphans()
	p.startVia(fmt.Sprintf(`exec unshare --mount --propagation private sh -c '%s exec %s "$@"' shim "$@"`, cover.String(), shimBinary))
	for id := range pids {
		p.awaitSupervisorLog("cannot be known", id)
	}
	for id, pid := range pids {
		if s, err := p.state(t.Context(), id); err != nil || s.GetStatus() != api.Status_STATUS_RUNNING || !lives(pid) {
			t.Fatalf("%s: %v, %v, lives: %v", id, s, err, lives(pid))
		}
		if err := p.Kill(t.Context(), id, uint32(syscall.SIGTERM), false); err == nil {
			t.Errorf("%s: a signal that could not be sent is no error", id)
		}
	}
	if err := syscall.Kill(int(pids["ends"]), syscall.SIGTERM); err != nil {
		t.Fatal(err)
	}
	out, err := exec.Command("nsenter", "--mount", "--target", strconv.Itoa(p.pid()), "sh", "-c", uncover.String()).CombinedOutput()
	t.Logf("uncovered: %s, %v", out, err) // the one that has ended may have taken the mount along
	if e := p.awaitExit(t.Context(), "ends").Exit; e.CodeKnown && e.Code != 7 {
		t.Errorf("exit %v", e)
	}
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(10 * time.Millisecond) {
		err := p.Kill(t.Context(), "runs", uint32(syscall.SIGTERM), false)
		if err == nil {
			break
		}
		if time.Now().After(deadline) {
			t.Fatal(err)
		}
	}
	if e := p.awaitExit(t.Context(), "runs").Exit; e.CodeKnown && e.Code != 7 || !e.CodeKnown && hasExitInfo() {
		t.Errorf("exit %v, want 7", e)
	}
}

// awaitSupervisorLog waits until the supervisor's log has a line with all the words.
func (p *pod) awaitSupervisorLog(words ...string) {
	p.t.Helper()
	for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
		log, err := os.ReadFile(filepath.Join(p.dir, "shim.log"))
		if err != nil {
			p.t.Fatal(err)
		}
		for line := range strings.Lines(string(log)) {
			if !slices.ContainsFunc(words, func(word string) bool { return !strings.Contains(line, word) }) {
				return
			}
		}
		if time.Now().After(deadline) {
			p.t.Fatalf("no line with %q in\n%s", words, log)
		}
	}
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

// Output that cannot be opened at adoption is in the log when it can be, with all that
// was written meanwhile.
func TestAdoptionWhenOutputCannotBeOpened(t *testing.T) {
	p := startPod(t)
	p.run("app", "i=0; while [ $i -lt 100 ]; do i=$((i+1)); echo line $i; sleep 0.01; done")
	fifo, away := filepath.Join(p.dir, api.StreamDir, "app."+api.Stdout), filepath.Join(p.dir, "away")
	p.killShim()
	reapOrphans()
	if err := os.Rename(fifo, away); err != nil {
		t.Fatal(err)
	}
	p.restart()
	p.awaitSupervisorLog("tried again", "app")
	if err := os.Rename(away, fifo); err != nil {
		t.Fatal(err)
	}
	p.awaitExit(t.Context(), "app")
	p.awaitInLog("app", " line 100\n")
	log, err := os.ReadFile(p.logPath("app"))
	if err != nil {
		t.Fatal(err)
	}
	for i := 1; i <= 100; i++ {
		if !strings.Contains(string(log), fmt.Sprintf(" line %d\n", i)) {
			t.Errorf("line %d is not in the log", i)
		}
	}
}

// A journal that cannot be opened at adoption costs what was in it, which the log says,
// and nothing later: the next supervisor that is killed loses no byte.
func TestAdoptionWhenTheJournalCannotBeOpened(t *testing.T) {
	p := startPod(t)
	p.run("app", `n=0; trap 'n=$((n+1))' USR1; await() { while [ $n -lt $1 ]; do sleep 0.01; done; }
		echo ready; await 1; printf 'one '; echo err >&2; await 2; echo two`)
	p.awaitInLog("app", "ready")
	p.killShim()
	reapOrphans()
	journal := filepath.Join(p.dir, "journal.1")
	if err := errors.Join(os.RemoveAll(journal), os.Mkdir(journal, 0o700)); err != nil {
		t.Fatal(err)
	}
	p.restart()
	p.awaitSupervisorLog("journal was replaced", "is a directory")
	p.awaitInLog("app", "of stdout may be missing here")
	p.signal("app", syscall.SIGUSR1)
	p.awaitInLog("app", " err\n") // what was printed before that is read, or in the fifo
	p.killShim()
	reapOrphans()
	p.restart()
	p.signal("app", syscall.SIGUSR1)
	p.awaitExit(t.Context(), "app")
	const want = "ready\none two\n"
	if got := p.awaitLogged("app", api.Stdout, len(want)); got != want {
		t.Errorf("stdout in the log: %q", got)
	}
}

func (p *pod) signal(id string, signal syscall.Signal) {
	p.t.Helper()
	if err := p.Kill(p.t.Context(), id, uint32(signal), false); err != nil {
		p.t.Fatal(err)
	}
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

// A record that cannot be read costs no container its life, whatever made it: it is left
// alone, the others are served, and it can be deleted.
func TestAdoptionOfUnreadableRecords(t *testing.T) {
	p := startPod(t)
	p.run("served", "sleep 1000")
	pids := map[string]uint32{}
	for kind, change := range byRuntime(t) {
		id := strings.ReplaceAll(kind, "-", "") + "unreadable"
		pids[id] = uint32(p.run(id, "while true; do echo hi; sleep 0.01; done", change).Pid)
	}
	p.killShim()
	reapOrphans()
	for id := range pids {
		p.garble("records/" + id + ".json")
	}
	p.restart()
	for id, pid := range pids {
		if !lives(pid) {
			t.Errorf("%s was ended", id)
		}
		if s, err := p.state(t.Context(), id); !errdefs.IsNotFound(err) {
			t.Errorf("%s is known: %v, %v", id, s, err)
		}
	}
	if r, err := p.ExecSync(t.Context(), "served", sh("echo hi"), 0, 10); err != nil || string(r.Stdout) != "hi\n" {
		t.Errorf("exec in the other container: %+v, %v", r, err)
	}
	if err := p.Delete(t.Context(), "served", true); err != nil {
		t.Error(err)
	}
	for id, pid := range pids {
		if err := syscall.Kill(int(pid), syscall.SIGKILL); err != nil { // the daemon ends it by its cgroup
			t.Error(err)
		}
		if err := p.Delete(t.Context(), id, true); err != nil {
			t.Errorf("delete %s: %v", id, err)
		}
	}
	for _, dir := range []string{"records", "containers", api.StreamDir, api.ExitDir} {
		if left, err := os.ReadDir(filepath.Join(p.dir, dir)); err != nil || len(left) != 0 {
			t.Errorf("left in %s: %v, %v", dir, left, err)
		}
	}
	left, err := filepath.Glob("/sys/fs/cgroup/*" + cgroupParent + "/*unreadable")
	if err != nil {
		t.Fatal(err)
	}
	for _, path := range left { // the daemon's, once its processes have ended
		for deadline := time.Now().Add(time.Minute); ; time.Sleep(time.Millisecond) {
			err := os.Remove(path)
			if err == nil || os.IsNotExist(err) {
				break
			}
			if time.Now().After(deadline) {
				t.Error(err)
				break
			}
		}
	}
}

// garble makes a file of the supervisor's one that cannot be decoded, if it is there.
func (p *pod) garble(name string) {
	p.t.Helper()
	path := filepath.Join(p.dir, name)
	if _, err := os.Stat(path); err != nil {
		return
	}
	if err := os.WriteFile(path, []byte("{"), 0o600); err != nil {
		p.t.Fatal(err)
	}
}

// What a runtime has of a container need not be readable to stop and delete it: the
// supervisor's record is enough.
func TestAdoptionWithoutItsState(t *testing.T) {
	p := startPod(t)
	files := map[string]string{"builtin": "containers/%s/state.json", "runc": "oci/runc/states/%s/state.json"}
	pids := map[string]uint32{}
	for kind, change := range byRuntime(t) {
		pids[kind] = uint32(p.run(strings.ReplaceAll(kind, "-", ""), "while true; do sleep 1; done", change).Pid)
	}
	p.killShim()
	reapOrphans()
	for kind, file := range files {
		path := fmt.Sprintf(file, strings.ReplaceAll(kind, "-", ""))
		if _, err := os.Stat(filepath.Join(p.dir, path)); err != nil {
			t.Fatal(err)
		}
		p.garble(path)
	}
	p.restart()
	for kind, pid := range pids {
		id := strings.ReplaceAll(kind, "-", "")
		if s, err := p.state(t.Context(), id); err != nil || s.GetStatus() != api.Status_STATUS_RUNNING || !lives(pid) {
			t.Errorf("%s: %v, %v, lives: %v", kind, s, err, lives(pid))
			continue
		}
		if err := p.Delete(t.Context(), id, true); err != nil {
			t.Errorf("%s: delete: %v", kind, err)
		}
		if lives(pid) {
			t.Errorf("%s: its process lives on", kind)
		}
		if left, _ := filepath.Glob("/sys/fs/cgroup/*" + cgroupParent + "/" + id); len(left) > 0 {
			t.Errorf("%s: left are %v", kind, left)
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
