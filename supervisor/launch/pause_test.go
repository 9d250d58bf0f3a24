package launch_test

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"testing"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/supervisor/starter"
)

// variants are what pods ask for of their pause.
var variants = map[string]func(*specs.Spec){
	"a plain pod": func(*specs.Spec) {},
	"its own host name and parameters": func(s *specs.Spec) {
		s.Hostname = "web-0"
		s.Linux.Sysctl = map[string]string{"kernel.shm_rmid_forced": "1", "kernel.msgmax": "4711"}
	},
	"a network namespace": func(s *specs.Spec) {
		s.Linux.Namespaces = append(s.Linux.Namespaces, joined(specs.NetworkNamespace, "net"))
	},
	"the node's processes":   func(s *specs.Spec) { withoutNamespace(s, specs.PIDNamespace) },
	"only mounts of its own": func(s *specs.Spec) { s.Linux.Namespaces = s.Linux.Namespaces[:1] },
	"a user and groups": func(s *specs.Spec) {
		s.Process.User = specs.User{UID: 1234, GID: 5678, AdditionalGids: []uint32{7, 8, 100000}}
	},
	"no filter":           func(s *specs.Spec) { s.Linux.Seccomp = nil },
	"flags of the filter": func(s *specs.Spec) { s.Linux.Seccomp.Flags = []specs.LinuxSeccompFlag{} },
}

// A pause that is launched cannot be told from one that libcontainer's init became.
func TestLaunchedIsWhatInitBecomes(t *testing.T) {
	n, number := newNode(t), 0
	for name, change := range variants {
		t.Run(name, func(t *testing.T) {
			number++
			want := n.lookInit(t, fmt.Sprintf("byinit%02d", number), change)
			got := n.lookPause(t, fmt.Sprintf("launched%02d", number), change)
			compare(t, got, want)
		})
	}
}

func compare(t *testing.T, got, want map[string]string) {
	t.Helper()
	for key := range want {
		if got[key] != want[key] {
			t.Errorf("%s:\n--- launched\n%s\n--- by init\n%s", key, got[key], want[key])
		}
	}
	if len(got) != len(want) {
		t.Errorf("%d facts, want %d", len(got), len(want))
	}
}

func (n *node) lookInit(t *testing.T, id string, change func(*specs.Spec)) map[string]string {
	t.Helper()
	spec := n.spec(id)
	change(spec)
	pid := n.create(t, id, spec)
	rests(t, pid, spec.Process.Args)
	return seenOf(t, pid, id)
}

// create makes a container by libcontainer, which ends with the test.
func (n *node) create(t *testing.T, id string, spec *specs.Spec) (pid int) {
	t.Helper()
	config, err := json.Marshal(spec)
	err = errors.Join(err, os.MkdirAll(n.bundle(id), 0o755), os.WriteFile(n.bundle(id)+"/config.json", config, 0o644))
	if err == nil {
		pid, err = n.ask(starter.Request{Verb: starter.Create, Container: starter.Container{ID: id}})
	}
	if err == nil {
		_, err = os.ReadFile(filepath.Join(n.dir, "states", id, launch.FIFOFile))
	}
	must(t, err)
	t.Cleanup(func() {
		_ = syscall.Kill(pid, syscall.SIGKILL)
		gone(t, pid)
		if _, err := n.ask(starter.Request{Verb: starter.Delete, Container: starter.Container{ID: id}}); err != nil {
			t.Error(err)
		}
	})
	return pid
}

func (n *node) lookPause(t *testing.T, id string, change func(*specs.Spec)) map[string]string {
	t.Helper()
	spec := n.spec(id)
	change(spec)
	if !launch.CanPause(spec) {
		t.Fatal("it is not launched")
	}
	p, err := n.pause(t, id, spec)
	must(t, err)
	defer n.end(t, p)
	if strings.Contains(read(fmt.Sprintf("/proc/%d/cmdline", p.Child.PID)), "/pause") {
		t.Error("it does not wait at the barrier")
	}
	if _, err := os.ReadFile(n.fifo(id)); err != nil {
		t.Fatal(err)
	}
	rests(t, p.Child.PID, spec.Process.Args)
	return seenOf(t, p.Child.PID, id)
}

func (n *node) fifo(id string) string { return filepath.Join(n.dir, id, launch.FIFOFile) }

func (n *node) pause(t *testing.T, id string, spec *specs.Spec) (*launch.Launched, error) {
	t.Helper()
	dir := filepath.Dir(n.fifo(id))
	must(t, os.MkdirAll(dir, 0o755))
	return n.Pause(t.Context(), launch.Pause{ID: id, Dir: dir, Spec: spec, Cgroup: n.facts(id).CgroupConfig()})
}

// end ends what was launched, and removes its cgroups.
func (n *node) end(t *testing.T, l *launch.Launched) {
	t.Helper()
	if err := l.Process.Signal(unix.SIGKILL); err != nil {
		t.Error(err)
	}
	if status := l.Child.Wait(); status.Signal() != unix.SIGKILL {
		t.Errorf("it ended with %v", status)
	}
	if err := l.Process.Close(); err != nil {
		t.Error(err)
	}
	for _, dir := range l.Cgroups {
		if err := os.Remove(dir); err != nil && !os.IsNotExist(err) {
			t.Error(err)
		}
	}
}

// What fails is named, is the container's fault, and leaves nothing.
func TestPauseThatFails(t *testing.T) {
	n := newNode(t)
	for words, change := range map[string]func(*specs.Spec){
		"/absent": func(s *specs.Spec) { s.Process.Args = []string{"/absent"} },
		"msgmax":  func(s *specs.Spec) { s.Linux.Sysctl = map[string]string{"kernel.msgmax": "words"} },
	} {
		spec := n.spec("failing0")
		change(spec)
		_, err := n.pause(t, "failing0", spec)
		if e := n.facts("failing0").Remove(); e != nil {
			t.Error(e)
		}
		if !errdefs.IsFailedPrecondition(err) || !strings.Contains(fmt.Sprint(err), words) {
			t.Errorf("%s: %v", words, err)
		}
		nothingLeft(t)
	}
}

// A launch ends with its context, and leaves nothing.
func TestPauseThatIsGivenUp(t *testing.T) {
	n := newNode(t)
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	dir := filepath.Dir(n.fifo("given-up"))
	must(t, os.MkdirAll(dir, 0o755))
	_, err := n.Pause(ctx, launch.Pause{ID: "given-up", Dir: dir, Spec: n.spec("given-up"), Cgroup: n.facts("given-up").CgroupConfig()})
	err = errors.Join(err, n.facts("given-up").Remove())
	if !strings.Contains(fmt.Sprint(err), "waiting for its first process") || !strings.Contains(fmt.Sprint(err), context.Canceled.Error()) {
		t.Errorf("%v", err)
	}
	nothingLeft(t)
}
