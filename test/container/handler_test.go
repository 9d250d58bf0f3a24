package container

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// runc is Debian's, which hack/unpack has unpacked for the tests.
func runc(t *testing.T) string {
	t.Helper()
	path, err := filepath.Abs("../../bin/debian/usr/sbin/runc")
	check(t, err)
	if _, err := os.Stat(path); err != nil {
		t.Fatalf("run 'make peers-test' first: %v", err)
	}
	return path
}

// The containers of a pod are made by the runtime of its handler: runc keeps
// its own state of them, and libcontainer in the shim has none.
func TestHandlerOfTypeOCI(t *testing.T) {
	n := newNode(t, harness.Runtime("runc", runc(t)), harness.Config("default_runtime = 'runc'\n"))
	nameless := &pod{Node: n, t: t, config: n.PodConfig("nameless")}
	made, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: nameless.config})
	check(t, err)
	nameless.id = made.PodSandboxId
	if states := statesOf(t, n, "oci/runc/states", nameless.run("app", forever)); states != 1 {
		t.Errorf("runc has %d states of the container of a pod that names no handler, want 1", states)
	}
	p := runPod(t, n, "web")
	id := p.run("app", "trap 'exit 5' USR1; echo hello; while :; do sleep 0.05; done")
	if states := statesOf(t, n, "oci/runc/states", id); states != 1 {
		t.Errorf("runc has %d states of the container, want 1", states)
	}
	if states := statesOf(t, n, "containers", id); states != 0 {
		t.Errorf("libcontainer has %d states of the container, want none", states)
	}
	same(t, "exec", p.exec(id, "echo from exec"), "from exec")

	n.Kill()
	n.Start()
	check(t, p.stop(id, 20))
	p.wantExit(id, 5, "Error")
	if stdout, _ := p.logs(id); stdout != "hello\n" {
		t.Errorf("log: %q", stdout)
	}
	p.wantExit(p.run("oom", "tail /dev/zero", memory(16<<20)), 137, "OOMKilled")
	absent := p.create(shell("absent", "", command("/no/such")))
	if err := p.start(absent); err == nil || !strings.Contains(err.Error(), "/no/such") {
		t.Errorf("start of a program that is not there: %v", err)
	}
	p.wantExit(absent, 128, "StartError")
}

// A pod that names no handler keeps the one that was the default when it was made: a
// container that is made after a reload or a restart with another one has the runtime of
// its siblings, and listings still say that none was named.
func TestDefaultHandlerOfAPodStays(t *testing.T) {
	n := newNode(t, harness.Runtime("runc", runc(t)))
	nameless := func(name string) *pod {
		p := &pod{Node: n, t: t, config: n.PodConfig(name)}
		made, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: p.config})
		check(t, err)
		p.id = made.PodSandboxId
		return p
	}
	wantRunc := func(p *pod, name string, want int) {
		t.Helper()
		if states := statesOf(t, n, "oci/runc/states", p.run(name, forever)); states != want {
			t.Errorf("runc has %d states of container %s of pod %s, want %d", states, name, p.config.Metadata.Name, want)
		}
	}
	byDefault := func(handler string) {
		dropIns := filepath.Join(n.Dir, "config.toml.d")
		check(t, os.MkdirAll(dropIns, 0o755))
		check(t, os.WriteFile(filepath.Join(dropIns, "default.toml"), []byte("default_runtime = '"+handler+"'\n"), 0o600))
	}
	builtin := nameless("builtin")
	wantRunc(builtin, "first", 0)

	byDefault("runc")
	check(t, unix.Kill(n.PID(), unix.SIGHUP))
	eventually(t, "it is reloaded", func() bool { return strings.Contains(n.Log(), "applied=[default_runtime]") })
	wantRunc(builtin, "reloaded", 0)
	byRunc := nameless("by-runc")
	wantRunc(byRunc, "first", 1)

	n.Kill()
	byDefault("")
	n.Start()
	wantRunc(byRunc, "restarted", 1)
	wantRunc(builtin, "restarted", 0)
	list, err := n.Runtime.ListPodSandbox(limited(t), &runtimeapi.ListPodSandboxRequest{})
	check(t, err)
	for _, item := range list.Items {
		if item.RuntimeHandler != "" {
			t.Errorf("pod %s is listed with handler %q, it named none", item.Metadata.Name, item.RuntimeHandler)
		}
	}
}

// statesOf counts the directories named like the container below a directory
// of any shim.
func statesOf(t *testing.T, n *harness.Node, below, id string) int {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(n.State, "shim*", "*", below, id))
	check(t, err)
	more, err := filepath.Glob(filepath.Join(n.State, "shim*", below, id))
	check(t, err)
	return len(found) + len(more)
}

// A handler whose runtime is not there fails its own pods before anything is
// made, is named by Status, and keeps no one else from running.
func TestHandlerWithoutItsRuntime(t *testing.T) {
	n := newNode(t, harness.Runtime("gone", "/no/such/runtime"))
	_, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web"), RuntimeHandler: "gone"})
	wantCode(t, err, codes.Unavailable)
	if err == nil || !strings.Contains(err.Error(), "/no/such/runtime") {
		t.Errorf("the error does not name the program: %v", err)
	}
	_, err = n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web"), RuntimeHandler: "kata"})
	wantCode(t, err, codes.InvalidArgument)
	answer, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{Verbose: true})
	check(t, err)
	said := ""
	for _, condition := range answer.Status.Conditions {
		switch condition.Type {
		case "RuntimeHandlerReady/gone":
			said = condition.Message
			if condition.Status {
				t.Error("the handler is ready")
			}
		case runtimeapi.RuntimeReady:
			if !condition.Status {
				t.Error("the runtime is not ready for a handler's sake")
			}
		}
	}
	if !strings.HasSuffix(said, "no such file or directory") || !strings.Contains(said, "gone") || !strings.Contains(answer.Info["handlers"], "/no/such/runtime") {
		t.Errorf("Status says %q and %s", said, answer.Info["handlers"])
	}
	_, err = n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("other")})
	check(t, err)
}

// What a runtime does not say that it can do it is not asked for: it would make the
// container without a word of what is missing.
func TestRuntimeThatCannot(t *testing.T) {
	program := filepath.Join(t.TempDir(), "old")
	check(t, os.WriteFile(program, []byte(fmt.Sprintf("#!/bin/sh\ntest \"$1\" != features && exec %s \"$@\"\n", runc(t))), 0o755))
	n := newNRINode(t, "", harness.Runtime("old", program))
	n.connect("10", "adjuster")
	p := runPod(t, n.Node, "web", annotated("adjuster.nri.test/moves", `{"linux": {"netDevices": {"lo": {"name": "data0"}}}}`))
	rro := mounted(t.TempDir(), "/deep", func(m *runtimeapi.Mount) {
		m.Readonly, m.RecursiveReadOnly, m.Propagation = true, true, runtimeapi.MountPropagation_PROPAGATION_PRIVATE
	})
	for says, config := range map[string]*runtimeapi.ContainerConfig{
		"/deep read-only (recursive_read_only)": shell("deep", forever, rro),
		"network devices (linux.netDevices)":    shell("moves", forever),
	} {
		_, err := p.tryCreate(config)
		wantCode(t, err, codes.InvalidArgument)
		if err == nil || !strings.Contains(err.Error(), `handler "old"`) || !strings.Contains(err.Error(), says) {
			t.Errorf("want an error with %q: %v", says, err)
		}
	}
	if left := p.list(nil); len(left) > 0 {
		t.Errorf("left: %v", left)
	}
	same(t, "exec in another", p.exec(p.run("app", forever), "echo hi"), "hi")
}

// A handler is ready when its runtime has made a container, not when it says what it can
// do. One that is cured is ready without a word to the daemon.
func TestHandlerIsReadyOnceItHasMadeAContainer(t *testing.T) {
	program := filepath.Join(t.TempDir(), "runtime")
	write := func(script string) {
		t.Helper()
		check(t, os.WriteFile(program+".new", []byte("#!/bin/sh\n"+script+"\n"), 0o755))
		check(t, os.Rename(program+".new", program))
	}
	write(fmt.Sprintf(`case " $* " in *" create "*) exit 33; esac; exec %s "$@"`, runc(t)))
	n := newNode(t, harness.Runtime("broken", program))
	last := ""
	wait := func(ready bool, says string) {
		t.Helper()
		eventually(t, fmt.Sprintf("the handler is ready: %v %s", ready, says), func() bool {
			answer, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{})
			check(t, err)
			at := slices.IndexFunc(answer.Status.Conditions, func(c *runtimeapi.RuntimeCondition) bool { return c.Type == "RuntimeHandlerReady/broken" })
			c := answer.Status.Conditions[at]
			if c.Message != last {
				last = c.Message
				t.Log(last)
			}
			return c.Status == ready && strings.Contains(c.Message, says)
		})
	}
	wait(false, "exit status 33")
	write(fmt.Sprintf(`exec %s "$@"`, runc(t)))
	wait(true, "")
}
