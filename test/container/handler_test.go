package container

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// runc is Debian's, which hack/unpack has unpacked for the tests (make peers-test).
func runc(t *testing.T) string {
	path, err := filepath.Abs("../../bin/debian/usr/sbin/runc")
	check(t, err)
	_, err = os.Stat(path)
	check(t, err)
	return path
}

// The containers of a pod are made by the runtime of its handler: runc keeps
// its own state of them, and libcontainer in the shim has none.
func TestHandlerOfTypeOCI(t *testing.T) {
	n := newNode(t, nodetest.Runtime("runc", runc(t)), nodetest.Config("default_runtime = 'runc'\n"))
	wantStates(t, n, "oci/runc/states", runBuiltin(t, n, "nameless").run("app", forever), 1)
	p := runPod(t, n, "web")
	id := p.run("app", "trap 'exit 5' USR1; echo hello; while :; do sleep 0.05; done")
	wantStates(t, n, "oci/runc/states", id, 1)
	wantStates(t, n, "containers", id, 0)
	same(t, "exec", p.exec(id, "echo from exec"), "from exec")

	n.Crash()
	check(t, p.stop(id, 20))
	p.wantExit(id, 5, "Error")
	same(t, "log", p.stdout(id), "hello\n")
	p.wantExit(p.run("oom", "tail /dev/zero", memory(16<<20)), 137, "OOMKilled")
	absent := p.create(shell("absent", "", command("/no/such")))
	wantError(t, p.start(absent), "/no/such")
	p.wantExit(absent, 128, "StartError")
}

// A pod that names no handler keeps the one that was the default when it was made: a container that is made after a
// reload or a restart with another one has the runtime of its siblings, and listings still say that none was named.
func TestDefaultHandlerOfAPodStays(t *testing.T) {
	n := newNode(t, nodetest.Runtime("runc", runc(t)))
	wantRunc := func(p *pod, name string, want int) { wantStates(t, n, "oci/runc/states", p.run(name, forever), want) }
	builtin := runBuiltin(t, n, "builtin")
	wantRunc(builtin, "first", 0)

	reload(t, n, "default_runtime = 'runc'\n")
	wantRunc(builtin, "reloaded", 0)
	byRunc := runBuiltin(t, n, "by-runc")
	wantRunc(byRunc, "first", 1)

	reload(t, n, "default_runtime = ''\n")
	n.Crash()
	wantRunc(byRunc, "restarted", 1)
	wantRunc(builtin, "restarted", 0)
	for _, item := range nodetest.Call(t, n.Runtime.ListPodSandbox, &runtimeapi.ListPodSandboxRequest{}).Items {
		same(t, "handler of pod "+item.Metadata.Name+", which named none", item.RuntimeHandler, "")
	}
}

// wantStates counts the directories named like the container below a directory of any shim.
func wantStates(t *testing.T, n *nodetest.Node, below, id string, want int) {
	same(t, "states of the container in "+below, len(harness.Glob(t, n.State, "shims", "*", below, id)), want)
}

// condition is what Status says of a handler of this name.
func condition(t *testing.T, n *nodetest.Node, handler string) *runtimeapi.RuntimeCondition {
	all := nodetest.Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{}).Status.Conditions
	expect(t, all[0].Status, "the node is not ready: %v", all)
	return all[slices.IndexFunc(all, func(c *runtimeapi.RuntimeCondition) bool { return c.Type == "RuntimeHandlerReady/"+handler })]
}

// A handler whose runtime is not there fails its own pods before anything is
// made, is named by Status, and keeps no one else from running.
func TestHandlerWithoutItsRuntime(t *testing.T) {
	n := newNode(t, nodetest.Runtime("gone", "/no/such/runtime"))
	_, err := n.Runtime.RunPodSandbox(harness.Limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web"), RuntimeHandler: "gone"})
	wantCode(t, err, codes.Unavailable, "/no/such/runtime")
	_, err = n.Runtime.RunPodSandbox(harness.Limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web"), RuntimeHandler: "kata"})
	wantCode(t, err, codes.InvalidArgument)
	said, handlers := condition(t, n, "gone"), fmt.Sprint(nodetest.Info[any](t, n, "handlers"))
	expect(t, !said.Status && strings.Contains(said.Message, "gone"), "Status says %v", said)
	expect(t, strings.HasSuffix(said.Message, "no such file or directory"), "Status says %v", said)
	expect(t, strings.Contains(handlers, "/no/such/runtime"), "the handlers are %s", handlers)
	runBuiltin(t, n, "other")
}

// What a runtime does not say that it can do it is not asked for: it would make the
// container without a word of what is missing.
func TestRuntimeThatCannot(t *testing.T) {
	program := filepath.Join(t.TempDir(), "old")
	check(t, os.WriteFile(program, []byte(fmt.Sprintf("#!/bin/sh\ntest \"$1\" != features && exec %s \"$@\"\n", runc(t))), 0o755))
	n := newNRINode(t, "", nodetest.Runtime("old", program))
	n.connect("10", "adjuster")
	p := runPod(t, n.Node, "web", annotated("adjuster.nri.test/moves", `{"linux": {"netDevices": {"lo": {"name": "data0"}}}}`))
	for says, config := range harness.Sorted(map[string]*runtimeapi.ContainerConfig{
		"/deep read-only (recursive_read_only)": shell("deep", forever, mounted(t.TempDir(), "/deep", readonlyBelow)),
		"network devices (linux.netDevices)":    shell("moves", forever),
	}) {
		wantRefused(t, p.createErr(config), says, `handler "old"`)
	}
	same(t, "left", p.list(nil), nil)
	same(t, "exec in another", p.exec(p.run("app", forever), "echo hi"), "hi")
}

// A handler is ready when its runtime has made a container, not when it says what it can
// do. One that is cured is ready without a word to the daemon.
func TestHandlerIsReadyOnceItHasMadeAContainer(t *testing.T) {
	program := filepath.Join(t.TempDir(), "runtime")
	write := func(script string) {
		check(t, os.WriteFile(program+".new", []byte("#!/bin/sh\n"+script+"\n"), 0o755))
		check(t, os.Rename(program+".new", program))
	}
	write(fmt.Sprintf(`case " $* " in *" create "*) exit 33; esac; exec %s "$@"`, runc(t)))
	n := newNode(t, nodetest.Runtime("broken", program))
	harness.Eventually(t, "the handler is not ready", func() bool {
		c := condition(t, n, "broken")
		return !c.Status && strings.Contains(c.Message, "exit status 33")
	})
	write(fmt.Sprintf(`exec %s "$@"`, runc(t)))
	harness.Eventually(t, "the handler is ready", func() bool { return condition(t, n, "broken").Status })
}

// hostile writes a program that is the real runtime, but for a verb.
func hostile(t *testing.T, real, verb, script string) string {
	path := filepath.Join(t.TempDir(), filepath.Base(real))
	text := fmt.Sprintf("#!/bin/sh\nhas() { for a; do [ \"$a\" = %s ] && return 0; done; return 1; }\n"+
		"pidfile() { while [ $# -gt 0 ]; do [ \"$1\" = --pid-file ] && echo \"$2\"; shift; done; }\n"+
		"has \"$@\" && { %s\n}\nexec %s \"$@\"\n", verb, script, real)
	check(t, os.WriteFile(path, []byte(text), 0o755))
	return path
}

// A runtime that lies, dies, floods or hangs fails its own container, with an error that says what it did; nothing
// else is touched, and nothing is left: a process of another owner above all, whose pid it reports.
func TestHostileOCIRuntimes(t *testing.T) {
	const hangs = "sleep 86395 & sleep 86395; exit 1"
	for name, c := range harness.Sorted(map[string]struct{ verb, script, says string }{
		"a foreign pid":      {"create", `echo 1 > $(pidfile "$@"); exit 0`, "process 1 is not one that it has started"},
		"no process at all":  {"create", "exit 0", "has made no process"},
		"rubbish for a pid":  {"create", `echo -1 > $(pidfile "$@"); exit 0`, "no process id"},
		"a flood of errors":  {"create", "head -c 3000000 /dev/zero >&2; head -c 3000000 /dev/zero; exit 1", "create: exit status 1"},
		"its own death":      {"create", "kill -9 $$", "create: signal: killed"},
		"a start that fails": {"start", "exit 4", "start: exit status 4"},
		"a child it leaves":  {"create", "sleep 86395 & exit 5", "create: exit status 5"},
		"another's cgroup":   {"create", `sleep 86395 & echo $! > $(pidfile "$@"); exit 0`, "has put process"},
		"hangs in create":    {"create", hangs, ""},
		"hangs in start":     {"start", hangs, ""},
	}) {
		t.Run(name, func(t *testing.T) {
			var limit string
			if c.script == hangs {
				limit = "[limits]\ncreate = '8s'"
			}
			n := newNode(t, nodetest.Runtime("hostile", hostile(t, runc(t), c.verb, c.script)), nodetest.Config(limit))
			p, other := runPod(t, n, "web"), runBuiltin(t, n, "other")
			err := p.runErr(shell("app", forever))
			wantError(t, err, c.says)
			expect(t, len(fmt.Sprint(err)) <= 5000, "an error of %d bytes", len(fmt.Sprint(err)))
			other.exec(other.run("app", forever), "true")
			n.RemovePod(p.id)
			harness.Eventually(t, "what it has started has ended", func() bool { return len(processesWithArgument(t, "86395")) == 0 })
		})
	}
}

// runBuiltin runs a pod that names no handler.
func runBuiltin(t *testing.T, n *nodetest.Node, name string) *pod {
	config := n.PodConfig(name)
	answer := nodetest.Call(t, n.Runtime.RunPodSandbox, &runtimeapi.RunPodSandboxRequest{Config: config})
	return &pod{Node: n, t: t, id: answer.PodSandboxId, config: config}
}

// runErr makes and starts a container, of which nothing stays where that fails.
func (p *pod) runErr(config *runtimeapi.ContainerConfig) error {
	id, err := p.tryCreate(config)
	if err == nil {
		err = p.start(id)
		check(p.t, p.remove(id))
	}
	return err
}

func processesWithArgument(t *testing.T, argument string) (pids []string) {
	for _, file := range harness.Glob(t, "/proc/[0-9]*/cmdline") {
		line, err := os.ReadFile(file)
		if err == nil && strings.Contains(string(line), "\x00"+argument+"\x00") {
			pids = append(pids, file)
		}
	}
	return pids
}

func hooked(t *testing.T, hooks ...nodetest.Hook) option {
	device := nodetest.CDIDevice(t, hooks...)
	return func(c *runtimeapi.ContainerConfig) { c.CDIDevices = []*runtimeapi.CDIDevice{{Name: device}} }
}

var hookKinds = []string{"createRuntime", "createContainer", "startContainer", "poststart", "poststop"}

// Hooks of a CDI file run at their times, each given its own container and where its bundle is; also those that
// come after the daemon and the shim that made the container have died.
//
// cri: CDIDevice.name ContainerConfig.CDI_devices
func TestHooks(t *testing.T) {
	p := newPod(t)
	for _, killed := range []bool{false, true} {
		out := t.TempDir()
		check(t, os.Chmod(out, 0o777))
		var hooks []nodetest.Hook
		for _, kind := range hookKinds {
			dir := out
			if kind == "startContainer" {
				dir = "/out" // in the container
			}
			hooks = append(hooks, nodetest.Hook{Kind: kind, Script: fmt.Sprintf("cat > %s/%s", dir, kind)})
		}
		config := shell("app", forever, hooked(t, hooks...), mounted(out, "/out"))
		if killed { // and by the older way to ask
			config.Annotations, config.CDIDevices = map[string]string{"cdi.k8s.io/test": config.CDIDevices[0].Name}, nil
		}
		id := p.create(config)
		wantHooks := func(kinds ...string) {
			t.Helper()
			for _, kind := range hookKinds {
				var state specs.State
				data, err := os.ReadFile(filepath.Join(out, kind))
				if err == nil {
					check(t, json.Unmarshal(data, &state))
				}
				if ran := err == nil; ran != slices.Contains(kinds, kind) || ran && (state.ID != id || state.Bundle != filepath.Join(p.State, "containers", id)) {
					t.Errorf("%s has run: %t, when %v have to; it was told of %s in %s", kind, ran, kinds, state.ID, state.Bundle)
				}
			}
		}
		wantHooks(hookKinds[:2]...)
		if killed {
			p.Kill()
			p.killShim()
			p.Start()
			harness.Eventually(t, "it is adopted", func() bool { return p.status(id).State == created })
		}
		harness.Eventually(t, "it starts", func() bool { return p.start(id) == nil })
		wantHooks(hookKinds[:4]...)
		check(t, p.stop(id, 0))
		check(t, p.remove(id))
		wantHooks(hookKinds...)
	}
}

// A hook that hangs ends at its limit, and one whose children hold its output at that of
// the call, and leaves nothing; the supervisor continues. Poststop hooks run once after each creation that
// fails, and keep no container by failing or hanging.
func TestHookThatHangs(t *testing.T) {
	n := newNode(t, nodetest.Config("[limits]\ncreate = '10s'"))
	p := runPod(t, n, "web")
	witness := p.run("witness", "", command("sleep", "1000000"))
	pids, after := n.Supervisors(), filepath.Join(t.TempDir(), "after")
	with := func(script, kind string) *runtimeapi.ContainerConfig {
		poststop := nodetest.Hook{Kind: "poststop", Script: "echo >> " + after + "; sleep 7776 & exit 1", Seconds: 1}
		return shell("app", "true", noLog, hooked(t, nodetest.Hook{Kind: kind, Script: script, Seconds: 1}, poststop))
	}
	for script, says := range harness.Sorted(map[string]string{"exec sleep 7776": "hook ran past specified timeout of 1.0s", "sleep 7776 & sleep 7776": ""}) {
		for _, kind := range []string{"createRuntime", "createContainer", "startContainer"} {
			before := p.Look()
			wantError(t, p.runErr(with(script, kind)), says)
			same(t, "the supervisors", n.Supervisors(), pids)
			p.exec(witness, "true")
			same(t, fmt.Sprintf("%s, %q: differences", kind, script), p.Differences(before), nil)
		}
	}
	same(t, "poststop hooks", string(harness.Read(t, after)), strings.Repeat("\n", 6))
}

// Stop and removal of a pod beside a creation whose hook hangs end it, and never the shim.
//
// attack: denial of service: hooks of the node (CDI) hang while a container is created or started
// held: only that container waits; its pod can be removed, supervisor and other pods continue
func TestStopBesideAHookThatHangs(t *testing.T) {
	for _, kind := range []string{"createRuntime", "createContainer"} {
		t.Run(kind, func(t *testing.T) {
			n := newNode(t)
			p, other := runPod(t, n, "web"), runPod(t, n, "other")
			witness := other.run("witness", quiet)
			p.wantExit(p.run("first", "true"), 0, "Completed")
			pids := n.Supervisors()
			began := filepath.Join(t.TempDir(), "began")
			config := shell("app", "true", hooked(t, nodetest.Hook{Kind: kind, Script: "touch " + began + "; sleep 7775 & sleep 7775"}))
			made := beside(func() error { return p.createErr(config) })
			harness.Eventually(t, "the hook runs", func() bool { _, err := os.Stat(began); return err == nil })
			check(t, p.stopPod())
			wantError(t, <-made)
			for _, pid := range n.Supervisors() { // one of its own goes with the pod
				expect(t, slices.Contains(pids, pid), "supervisors %v, before %v", n.Supervisors(), pids)
			}
			other.exec(witness, "true")
			n.RemovePod(p.id)
			harness.Eventually(t, "the hook has ended, with its child", func() bool { return len(processesWithArgument(t, "7775")) == 0 })
		})
	}
}

// A supervisor that dies while it deletes a container has a successor that runs the poststop hooks, before RemoveContainer answers.
func TestPoststopHooksOfADeadSupervisor(t *testing.T) {
	p := newPod(t)
	ran := filepath.Join(t.TempDir(), "ran")
	script := fmt.Sprintf("echo >> %s; kill -KILL %d", ran, p.Supervisors()[0])
	id := p.create(shell("app", "true", hooked(t, nodetest.Hook{Kind: "poststop", Script: script, Seconds: 10})))
	check(t, errors.Join(p.start(id), p.remove(id)))
	same(t, "runs of the hook", string(harness.Read(t, ran)), "\n\n")
}
