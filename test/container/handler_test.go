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
	wantStates(t, n, "oci/runc/states", runBuiltin(t, n, "nameless").run("app", forever), 1)
	p := runPod(t, n, "web")
	id := p.run("app", "trap 'exit 5' USR1; echo hello; while :; do sleep 0.05; done")
	wantStates(t, n, "oci/runc/states", id, 1)
	wantStates(t, n, "containers", id, 0)
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
	wantRunc := func(p *pod, name string, want int) {
		t.Helper()
		wantStates(t, n, "oci/runc/states", p.run(name, forever), want)
	}
	byDefault := func(handler string) {
		dropIns := filepath.Join(n.Dir, "config.toml.d")
		check(t, os.MkdirAll(dropIns, 0o755))
		check(t, os.WriteFile(filepath.Join(dropIns, "default.toml"), []byte("default_runtime = '"+handler+"'\n"), 0o600))
	}
	builtin := runBuiltin(t, n, "builtin")
	wantRunc(builtin, "first", 0)

	byDefault("runc")
	check(t, unix.Kill(n.PID(), unix.SIGHUP))
	eventually(t, "it is reloaded", func() bool { return strings.Contains(n.Log(), "applied=[default_runtime]") })
	wantRunc(builtin, "reloaded", 0)
	byRunc := runBuiltin(t, n, "by-runc")
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

// wantStates counts the directories named like the container below a directory of any shim.
func wantStates(t *testing.T, n *harness.Node, below, id string, want int) {
	t.Helper()
	found, err := filepath.Glob(filepath.Join(n.State, "shims", "*", below, id))
	check(t, err)
	if len(found) != want {
		t.Errorf("%d states of the container in %s, want %d", len(found), below, want)
	}
}

// condition is what Status says of a handler of this name.
func condition(t *testing.T, n *harness.Node, handler string) *runtimeapi.RuntimeCondition {
	t.Helper()
	answer, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{})
	check(t, err)
	all := answer.Status.Conditions
	if !all[0].Status {
		t.Errorf("the node is not ready: %v", all)
	}
	return all[slices.IndexFunc(all, func(c *runtimeapi.RuntimeCondition) bool { return c.Type == "RuntimeHandlerReady/"+handler })]
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
	said, handlers := condition(t, n, "gone"), harness.Info[any](t, n, "handlers")
	if said.Status || !strings.HasSuffix(said.Message, "no such file or directory") || !strings.Contains(said.Message, "gone") || !strings.Contains(fmt.Sprint(handlers), "/no/such/runtime") {
		t.Errorf("Status says %v and %v", said, handlers)
	}
	runBuiltin(t, n, "other")
}

// What a runtime does not say that it can do it is not asked for: it would make the
// container without a word of what is missing.
func TestRuntimeThatCannot(t *testing.T) {
	program := filepath.Join(t.TempDir(), "old")
	check(t, os.WriteFile(program, []byte(fmt.Sprintf("#!/bin/sh\ntest \"$1\" != features && exec %s \"$@\"\n", runc(t))), 0o755))
	n := newNRINode(t, "", harness.Runtime("old", program))
	n.connect("10", "adjuster")
	p := runPod(t, n.Node, "web", annotated("adjuster.nri.test/moves", `{"linux": {"netDevices": {"lo": {"name": "data0"}}}}`))
	for says, config := range map[string]*runtimeapi.ContainerConfig{
		"/deep read-only (recursive_read_only)": shell("deep", forever, mounted(t.TempDir(), "/deep", readonlyBelow)),
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
	eventually(t, "the handler is not ready", func() bool {
		c := condition(t, n, "broken")
		return !c.Status && strings.Contains(c.Message, "exit status 33")
	})
	write(fmt.Sprintf(`exec %s "$@"`, runc(t)))
	eventually(t, "the handler is ready", func() bool { return condition(t, n, "broken").Status })
}
