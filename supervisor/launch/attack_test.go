package launch

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
)

// attacked is a container with a program that attacks what is let in, and another one
// that nothing is done to.
type attacked struct {
	*containerOf
	other *containerOf
}

func newAttacked(t *testing.T, change func(*specs.Spec)) *attacked {
	t.Helper()
	n := newNode(t)
	_, status := command(t, "gcc", "-O2", "-static", "-Wall", "-o", n.rootfs+"/attacker", "../../test/hostile/testdata/attacker.c")
	program, err := os.ReadFile(n.rootfs + "/pause")
	err = errors.Join(err, os.Mkdir(n.rootfs+"/etc", 0o755),
		os.WriteFile(n.rootfs+"/minicri-launch", program, 0o755))
	if status != 0 || err != nil {
		t.Fatal(status, err)
	}
	return &attacked{n.container(t, "attacked", change), n.container(t, "other", change)}
}

// limit is that of an exec that is held up: long enough to come there on a machine
// that has a lot to do.
const limit = 3 * time.Second

func noFilter(s *specs.Spec) { s.Linux.Seccomp = nil }

// attack runs the program with its output in a file, until the test ends. It may trace
// if it is to.
func (a *attacked) attack(t *testing.T, trace bool, args ...string) (output string) {
	t.Helper()
	file, err := os.Create(filepath.Join(t.TempDir(), "output"))
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	p := execProcess()
	p.Args = append([]string{"/attacker"}, args...)
	if trace {
		set := []string{"CAP_SYS_PTRACE"}
		p.Capabilities = &specs.LinuxCapabilities{Bounding: set, Effective: set, Permitted: set}
	}
	l, err := a.exec(t, t.Context(), p, func(e *Exec) { e.Streams[1] = file })
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { a.node.end(t, l) })
	return file.Name()
}

// lively fails the test if this process, or an exec in another container, is held up
// until it is told to stop.
func (a *attacked) lively(t *testing.T) (stop func()) {
	t.Helper()
	ctx, cancel := context.WithCancel(t.Context())
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		for worst := time.Duration(0); ; time.Sleep(100 * time.Millisecond) {
			began := time.Now()
			var stats runtime.MemStats
			runtime.ReadMemStats(&stats) // stops all threads
			l, err := a.other.exec(t, context.Background(), execProcess())
			if err != nil {
				t.Errorf("an exec in another container: %v", err)
				return
			}
			worst = max(worst, time.Since(began))
			a.node.end(t, l)
			if ctx.Err() != nil {
				t.Logf("other execs took %v at most", worst)
				return
			}
		}
	}()
	return func() {
		cancel()
		select {
		case <-ended:
		case <-time.After(time.Minute):
			t.Error("an exec in another container hangs")
		}
	}
}

// attack: A container that learns the next pid and stops it (kill(2), SIGSTOP), without any capability, while commands are run in it.
// held: Its own commands end at their limits, with an error that says so; those in other containers are as fast as before.
// field: runc holds; minicri 0.1 stopped the node's supervisor.
func TestStopperOfExecs(t *testing.T) {
	for name, change := range map[string]func(*specs.Spec){
		"no filter": noFilter, "the default profile": func(s *specs.Spec) { s.Linux.Seccomp = defaultProfile(t, s) },
	} {
		t.Run(name, func(t *testing.T) {
			a := newAttacked(t, change)
			a.attack(t, false, "hit", "19") // SIGSTOP
			stop := a.lively(t)
			defer stop()
			hit := 0
			for range 20 {
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				began := time.Now()
				l, err := a.exec(t, ctx, execProcess())
				cancel()
				if took := time.Since(began); took > 20*time.Second {
					t.Errorf("it took %v", took)
				}
				if err == nil {
					a.node.end(t, l)
					continue
				}
				if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "to execute its program") {
					t.Error(err)
				}
				hit++
			}
			if hit == 0 {
				t.Error("no exec was hit: this shows nothing")
			}
			t.Logf("%d of 20 were stopped", hit)
		})
	}
}

// attack: The same with SIGKILL.
// held: A command that is killed before it is executed is an error, not one that was started and has ended.
func TestKillerOfExecs(t *testing.T) {
	a := newAttacked(t, noFilter)
	a.attack(t, false, "hit", "9")
	early := 0
	for range 50 {
		l, err := a.exec(t, t.Context(), execProcess())
		switch {
		case errors.Is(err, errKilled):
			early++
		case err != nil:
			t.Error(err)
		default:
			_ = l.Process.Signal(unix.SIGKILL) // it may have ended
			l.Child.Wait()
			_ = l.Process.Close()
		}
	}
	if early == 0 {
		t.Error("none was killed before it was executed: this shows nothing")
	}
	t.Logf("%d of 50 were killed before they were executed", early)
}

// attack: A container with SYS_PTRACE in the same pid namespace looks into each process that is let in, from its first moment.
// held: It has the container's root, no descriptor but its streams and a socket, and the container's mounts and sockets.
// field: runc holds; in minicri 0.1 it had the root of the node.
func TestSpyOnExecs(t *testing.T) {
	a := newAttacked(t, noFilter)
	output := a.attack(t, true, "look")
	own := regexp.MustCompile(`^(root of the container|exe /(pause|attacker)|exe /memfd:minicri-launch \(deleted\)|cwd /|cwd /etc|fd/4 /etc|fd/[012] (pipe|/dev/null).*|fd/3 socket:.*|fd/4 pipe:.*|mountinfo .*|net/unix .*)$`)
	p := execProcess()
	p.Cwd = "/etc"
	for range 200 {
		l, err := a.exec(t, t.Context(), p)
		if err != nil {
			t.Fatal(err)
		}
		a.node.end(t, l)
	}
	mounts := ownLines(t, a.pid, "mountinfo")
	seen := map[string]int{}
	for line := range strings.Lines(read(output)) {
		line = strings.TrimSpace(line)
		kind, rest, _ := strings.Cut(line, " ")
		if !own.MatchString(line) || kind == "mountinfo" && !slices.Contains(mounts, rest) {
			t.Errorf("it saw: %s", line)
		}
		seen[kind]++
	}
	if seen["root"] == 0 || seen["fd/3"] == 0 {
		t.Errorf("it saw nothing before an execution, but %v: this shows nothing", seen)
	}
	t.Logf("it saw %v", seen)
}

// attack: A container with SYS_PTRACE in the same pid namespace takes the socket of each process that is let in, and says over it that processes of the node are of that launch.
// held: None of them is touched; the command fails or is executed.
func TestForgedWords(t *testing.T) {
	a := newAttacked(t, noFilter)
	victim := exec.Command("sleep", "1000000")
	if err := victim.Start(); err != nil {
		t.Fatal(err)
	}
	ended := make(chan error, 1)
	go func() { ended <- victim.Wait() }()
	defer func() { _ = victim.Process.Kill() }()
	output := a.attack(t, true, "forge", strconv.Itoa(victim.Process.Pid))
	forged := func() int { return strings.Count(read(output), "forged") }
	failed := 0
	for deadline := time.Now().Add(2 * time.Minute); forged() < 50 && time.Now().Before(deadline); {
		if l, err := a.exec(t, t.Context(), execProcess()); err == nil {
			a.node.end(t, l)
		} else {
			failed++
		}
	}
	if forged() < 50 {
		t.Errorf("%d words were forged: this shows nothing", forged())
	}
	t.Logf("%d words were forged, %d execs failed", forged(), failed)
	select {
	case err := <-ended:
		t.Errorf("a process of the node was ended: %v", err)
	default:
	}
}

func ownLines(t *testing.T, pid int, name string) (lines []string) {
	t.Helper()
	for line := range strings.Lines(read(fmt.Sprintf("/proc/%d/%s", pid, name))) {
		lines = append(lines, strings.TrimSpace(line))
	}
	return lines
}

// unified makes a cgroup of version 2.
func (n *node) unified(t *testing.T, name string) (dir string) {
	t.Helper()
	mount := "/sys/fs/cgroup"
	if _, err := os.Stat(mount + "/unified"); err == nil {
		mount += "/unified"
	}
	if _, err := os.Stat(mount + "/cgroup.controllers"); err != nil {
		t.Skip("no hierarchy of version 2")
	}
	dir = filepath.Join(mount, fmt.Sprintf("minicri-launch-%d-%s", os.Getpid(), name))
	if err := os.Mkdir(dir, 0o755); err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		eventually(t, "the cgroup can be removed", func() bool { err := os.Remove(dir); return err == nil || os.IsNotExist(err) })
	})
	return dir
}

// attack: Commands are run in a container that is frozen (cgroup v2), throttled or at its limit of processes.
// held: They end at their limits, with an error that says so; those in other containers are as fast as before.
func TestExecInFrozenCgroup(t *testing.T) {
	a := newAttacked(t, noFilter)
	dir := a.node.unified(t, "frozen")
	if err := os.WriteFile(dir+"/cgroup.freeze", []byte("1"), 0); err != nil {
		t.Fatal(err)
	}
	stop := a.lively(t)
	defer stop()
	for range 3 {
		ctx, cancel := context.WithTimeout(t.Context(), limit)
		_, err := a.exec(t, ctx, execProcess(), func(e *Exec) { e.Cgroups = map[string]string{"": dir} })
		cancel()
		if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "waiting for its helper in the cgroup of the container") {
			t.Error(err)
		}
	}
	if err := os.WriteFile(dir+"/cgroup.freeze", []byte("0"), 0); err != nil {
		t.Fatal(err)
	}
	// A helper that had no time to say its pid ends when it can.
	eventually(t, "nothing is left there", func() bool { return read(dir+"/cgroup.procs") == "" })
	l, err := a.exec(t, t.Context(), execProcess(), func(e *Exec) { e.Cgroups = map[string]string{"": dir} })
	if err != nil {
		t.Fatal(err)
	}
	eventually(t, "the process is alone there", func() bool {
		return strings.TrimSpace(read(dir+"/cgroup.procs")) == strconv.Itoa(l.Child.PID)
	})
	a.node.end(t, l)
}

// A frozen cgroup of version 1 is entered and not left before it is thawed.
func TestExecInFrozenCgroupOfVersion1(t *testing.T) {
	a := newAttacked(t, noFilter)
	freezer := a.cgroups(t)["freezer"]
	if freezer == "" {
		t.Skip("no freezer of version 1")
	}
	freeze := func(state string) {
		if err := os.WriteFile(freezer+"/freezer.state", []byte(state), 0); err != nil {
			t.Fatal(err)
		}
	}
	freeze("FROZEN")
	stop := a.lively(t)
	ctx, cancel := context.WithTimeout(t.Context(), limit)
	defer cancel()
	_, err := a.exec(t, ctx, execProcess())
	stop()
	freeze("THAWED")
	if !errors.Is(err, context.DeadlineExceeded) || !strings.Contains(err.Error(), "waiting for its first process") {
		t.Error(err)
	}
	nothingLeft(t, a.pid, a.other.pid)
}

// attack: A program that has the name of a process that is being launched.
// held: It starts and ends like any other.
// field: in minicri 0.1 it never started.
func TestExecOfTheSameName(t *testing.T) {
	a := newAttacked(t, noFilter)
	p := execProcess()
	p.Args = []string{"/minicri-launch"}
	l, err := a.exec(t, t.Context(), p)
	if err != nil {
		t.Fatal(err)
	}
	a.node.end(t, l)
	p.Args = []string{"/attacker", "7"}
	if l, err = a.exec(t, t.Context(), p); err != nil {
		t.Fatal(err)
	}
	if status := l.Child.Wait(); status.ExitStatus() != 7 {
		t.Errorf("it ended with %v", status)
	}
	_ = l.Process.Close()
}
