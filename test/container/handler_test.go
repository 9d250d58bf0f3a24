package container

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"

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
	n := newNode(t, harness.Runtime("runc", runc(t)))
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
		case "RuntimeHandlersReady":
			said = condition.Message
			if condition.Status {
				t.Error("all handlers are ready")
			}
		case runtimeapi.RuntimeReady:
			if !condition.Status {
				t.Error("the runtime is not ready for a handler's sake")
			}
		}
	}
	if !strings.HasSuffix(said, "no such file or directory") || !strings.Contains(said, "gone") || !strings.Contains(answer.Info["runtimeHandlers"], "/no/such/runtime") {
		t.Errorf("Status says %q and %s", said, answer.Info["runtimeHandlers"])
	}
	_, err = n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("other")})
	check(t, err)
}

// A shim whose own runtime is missing counts as missing itself: its pods fail before
// anything is made, or by what the shim says where only that can know; in both cases the
// error has what is to be done. When the runtime is there, the pods run.
func TestShimWithoutItsRuntime(t *testing.T) {
	program, err := filepath.Abs("../../bin/debian/usr/bin/containerd-shim-runc-v2")
	check(t, err)
	dir := t.TempDir()
	path := "PATH=" + withoutRunc(t) + ":" + dir
	hidden := filepath.Join(dir, "containerd-shim-runc-v2")
	check(t, os.WriteFile(hidden, []byte("#!/bin/sh\nexec "+program+" \"$@\"\n"), 0o755))
	n := newNode(t, harness.Runtime("hidden", hidden), harness.Runtime("shim", program), harness.Env(path))
	run := func(handler string) (*runtimeapi.RunPodSandboxResponse, error) {
		return n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: n.PodConfig("web"), RuntimeHandler: handler})
	}
	for handler, says := range map[string]string{"shim": program + " is not there", "hidden": "the shim found no runtime"} {
		_, err := run(handler)
		wantCode(t, err, codes.Unavailable)
		if err == nil || !strings.Contains(err.Error(), says) || !strings.Contains(err.Error(), "PATH") || !strings.Contains(err.Error(), "runc") {
			t.Errorf("a pod of %s: %v", handler, err)
		}
	}
	problems := func() (status string, found bool) {
		answer, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{})
		check(t, err)
		for _, condition := range answer.Status.Conditions {
			if condition.Type == "RuntimeHandlersReady" {
				return condition.Message, true
			}
		}
		return "", false
	}
	if said, _ := problems(); !strings.Contains(said, program+" is not there") || strings.Contains(said, `"hidden"`) {
		t.Errorf("Status says %q", said)
	}
	if output, err := n.RunCommand("check"); err == nil || !strings.Contains(output, program+" is not there") {
		t.Errorf("check says %s: %v", output, err)
	}
	other, err := run("")
	check(t, err)
	n.RemovePod(other.PodSandboxId)

	check(t, os.Symlink(runc(t), filepath.Join(dir, "runc")))
	if said, found := problems(); said != "" || !found {
		t.Errorf("Status says %q when the runtime is there", said)
	}
	for _, handler := range []string{"shim", "hidden"} {
		answer, err := run(handler)
		check(t, err)
		n.RemovePod(answer.PodSandboxId)
	}
}

// minicri check asks once, so it waits for what a runtime says, or until it is clear that
// the runtime hangs; then nothing of it is left. Nor is it of one that the daemon asks
// when that is killed.
func TestNothingIsLeftOfARuntimeThatHangs(t *testing.T) {
	path := filepath.Join(t.TempDir(), "hangs")
	check(t, os.WriteFile(path, []byte("#!/bin/sh\nexec sleep 86397\n"), 0o755))
	n := newNode(t, harness.Runtime("hangs", path))
	asked := func() bool {
		files, err := filepath.Glob("/proc/[0-9]*/cmdline")
		check(t, err)
		return slices.ContainsFunc(files, func(file string) bool {
			command, err := os.ReadFile(file)
			return err == nil && strings.Contains(string(command), "86397")
		})
	}
	if output, err := n.RunCommand("check"); err == nil || !strings.Contains(output, "hangs --version: no answer") {
		t.Errorf("check: %v: %s", err, output)
	}
	eventually(t, "the runtime is not being asked", func() bool { return !asked() })
	eventually(t, "it is being asked", func() bool {
		_, err := n.Runtime.Status(limited(t), &runtimeapi.StatusRequest{}) // asks anew at times
		check(t, err)
		return asked()
	})
	n.Kill()
	eventually(t, "the runtime has ended with the daemon", func() bool { return !asked() })
	n.Start()
}

// withoutRunc is PATH without the directories that have runc.
func withoutRunc(t *testing.T) string {
	t.Helper()
	dirs := slices.DeleteFunc(filepath.SplitList(os.Getenv("PATH")), func(dir string) bool {
		_, err := os.Stat(filepath.Join(dir, "runc"))
		return err == nil
	})
	return strings.Join(dirs, ":")
}

// What a runtime does not say that it can do it is not asked for: it would make the
// container without a word of what is missing.
func TestRuntimeThatCannot(t *testing.T) {
	program := filepath.Join(t.TempDir(), "old")
	check(t, os.WriteFile(program, []byte(fmt.Sprintf("#!/bin/sh\ntest \"$1\" != features && exec %s \"$@\"\n", runc(t))), 0o755))
	n := newNRINode(t, "", harness.Runtime("old", program))
	n.connect("10", "network-device-injector")
	p := runPod(t, n.Node, "web", annotated("netdevices.nri.test/moves", `{"lo": "data0"}`))
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

// Files that a runtime keeps of a container under a name of its own, as runsc does with
// its locks, are removed with the container.
func TestRuntimeThatLeavesFiles(t *testing.T) {
	program := filepath.Join(t.TempDir(), "leaves")
	script := `#!/bin/sh
for word; do
	[ "$before" != --root ] || root=$word
	before=$word
done
case " $* " in *" create "*) : > "$root/${word}_sandbox:$word.lock" ;; esac
exec ` + runc(t) + ` "$@"
`
	check(t, os.WriteFile(program, []byte(script), 0o755))
	p := runPod(t, newNode(t, harness.Runtime("leaves", program)), "web")
	lives, ends := p.run("lives", forever), p.run("ends", "exit 3")
	p.wantExit(ends, 3, "Error")
	check(t, p.remove(ends))
	for id, want := range map[string]int{lives: 1, ends: 0} {
		left, err := filepath.Glob(filepath.Join(supervisorDirs(t, p.Node)[0], "oci/leaves/states", id+"_*"))
		check(t, err)
		if len(left) != want {
			t.Errorf("container %s has %v, want %d", id, left, want)
		}
	}
}

// The pod of a handler of type shim is made by that shim, pause included; it
// lives over the death of the daemon and of the supervisor, and is gone with the
// pod.
func TestHandlerOfTypeShim(t *testing.T) {
	program, err := filepath.Abs("../../bin/debian/usr/bin/containerd-shim-runc-v2")
	check(t, err)
	if _, err := os.Stat(program); err != nil {
		t.Fatalf("run 'make test-deps' first: %v", err)
	}
	n := newNode(t, harness.Runtime("runc-shim", program))
	p := runPod(t, n, "web")
	id := p.run("app", "trap 'exit 5' USR1; echo hello; while :; do sleep 0.05; done")
	same(t, "exec", p.exec(id, "echo from exec"), "from exec")
	shim := parentOf(t, p.info(id).PID)
	same(t, "parent of the container", programOf(t, shim), "containerd-shim-runc-v2")
	if got := parentOf(t, p.pausePID()); got != shim {
		t.Errorf("pause has the parent %d (%s), the container %d", got, programOf(t, got), shim)
	}
	n.Kill()
	p.killOf(shims(n))
	n.Start()
	eventually(t, "it is adopted", func() bool { return p.status(id).State == running })
	check(t, p.update(id, &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 64 << 20}))
	same(t, "memory", p.limit(id, "memory"), "67108864")
	check(t, p.stop(id, 20))
	p.wantExit(id, 5, "Error")
	if stdout, _ := p.logs(id); stdout != "hello\n" {
		t.Errorf("log: %q", stdout)
	}
	p.wantExit(p.run("oom", "tail /dev/zero", memory(16<<20)), 137, "OOMKilled")
	terminal := p.run("terminal", "stty size; tty; exit 3", func(c *runtimeapi.ContainerConfig) { c.Tty = true })
	p.wantExit(terminal, 3, "Error")
	if stdout, _ := p.logs(terminal); !strings.Contains(stdout, "/dev/pts/0") && !strings.Contains(stdout, "/dev/console") {
		t.Errorf("what a container says on its terminal: %q", stdout)
	}
	if _, err := p.tryCreate(shell("bytes", forever, env("A", "\xff"))); err == nil || !strings.Contains(err.Error(), "not UTF-8") {
		t.Errorf("an environment that is not UTF-8: %v", err)
	}
	absent := p.create(shell("absent", "", command("/no/such")))
	if err := p.start(absent); err == nil || !strings.Contains(err.Error(), "/no/such") {
		t.Errorf("start of a program that is not there: %v", err)
	}
	p.wantExit(absent, 128, "StartError")
	n.RemovePod(p.id)
	eventually(t, "the shim has ended", func() bool { return programOf(t, shim) == "" })
}

// The runtime of a shim may still be at the start of a program that has ended: it is
// not killed with what the container has left.
func TestProgramThatEndsBeforeItsStart(t *testing.T) {
	p := runPod(t, newNode(t, harness.Runtime("runc-shim", shimWithRunc(t, "start", "sleep 0.3"))), "web")
	p.wantExit(p.run("app", "exit 3"), 3, "Error")
}

// One that hangs is: the container would never be known to have ended.
func TestStartOfAShimThatHangs(t *testing.T) {
	paused := filepath.Join(t.TempDir(), "paused")
	program := shimWithRunc(t, "start", fmt.Sprintf("test ! -e %s || sleep 1000", paused))
	p := runPod(t, newNode(t, harness.Runtime("runc-shim", program)), "web")
	check(t, os.WriteFile(paused, nil, 0o644))
	id := p.create(shell("app", "exit 3"))
	if err := p.start(id); err != nil && !strings.Contains(err.Error(), id) {
		t.Errorf("a start that hangs: %v", err)
	}
	if end := p.awaitExit(id); end.ExitCode == 0 {
		t.Errorf("a start that hangs: %v", end)
	}
	check(t, p.remove(id))
}

// The containers of a pod are made by the shim that the pod has, which is not looked for
// by a further run of its program; one that is gone is.
func TestShimOfAPodIsStartedOnce(t *testing.T) {
	dir := t.TempDir()
	log, program := filepath.Join(dir, "log"), filepath.Join(dir, "containerd-shim-runc-v2")
	script := fmt.Sprintf("#!/bin/sh\necho \"$@\" >> %s\nexec %s \"$@\"\n", log, shimOfRunc(t))
	check(t, os.WriteFile(program, []byte(script), 0o755))
	p := runPod(t, newNode(t, harness.Runtime("runc-shim", program)), "web")
	starts := func() (n int) {
		content, err := os.ReadFile(log)
		check(t, err)
		for line := range strings.Lines(string(content)) {
			if strings.HasSuffix(strings.TrimSpace(line), " start") {
				n++
			}
		}
		return n
	}
	first, second := p.run("first", forever), p.run("second", forever)
	if n := starts(); n != 1 {
		t.Errorf("the shim was started %d times", n)
	}
	if a, b := parentOf(t, p.info(first).PID), parentOf(t, p.info(second).PID); a != b {
		t.Errorf("the containers have the parents %d and %d", a, b)
	}
	same(t, "exec", p.exec(second, "echo hi"), "hi")
	check(t, p.stop(second, 0))
	check(t, p.remove(second))
	same(t, "exec in the other", p.exec(first, "echo hi"), "hi")
}

// An exec whose pid the shim has not said yet when the supervisor is killed ends as the
// others do.
func TestExecOfAShimThatHasNotSaidItsPID(t *testing.T) {
	endsExecs(t, runPod(t, newNode(t, harness.Runtime("runc-shim", shimWithRunc(t, "exec", "sleep 2"))), "web"))
}

// shimOfRunc is containerd-shim-runc-v2.
func shimOfRunc(t *testing.T) (path string) {
	t.Helper()
	path, err := filepath.Abs("../../bin/debian/usr/bin/containerd-shim-runc-v2")
	check(t, err)
	return path
}

// shimWithRunc is containerd-shim-runc-v2 with a runc that does more once it has done a
// verb.
func shimWithRunc(t *testing.T, verb, does string) (path string) {
	t.Helper()
	program, dir := shimOfRunc(t), t.TempDir()
	for name, script := range map[string]string{
		"containerd-shim-runc-v2": fmt.Sprintf("PATH=%s:$PATH exec %s \"$@\"", dir, program),
		"runc":                    fmt.Sprintf("%s \"$@\"; code=$?; case \" $* \" in *\" %s \"*) %s;; esac; exit $code", runc(t), verb, does),
	} {
		check(t, os.WriteFile(filepath.Join(dir, name), []byte("#!/bin/sh\n"+script+"\n"), 0o755))
	}
	return filepath.Join(dir, "containerd-shim-runc-v2")
}

// A shim keeps nothing of a container that no supervisor knows once it is removed, and
// ends with its pod; also where what the supervisor knew of the shim is spoilt.
func TestShimOfContainersThatNoSupervisorKnows(t *testing.T) {
	n := newNode(t, harness.Runtime("runc-shim", shimOfRunc(t)))
	p := runPod(t, n, "web")
	// The first to be removed does not say itself which shim it has.
	containers := []string{p.run("other", forever), p.run("app", forever)}
	spoilt := map[string][]string{
		containers[0]: {"records/%s.json", "records/%s.copy", "task/containerd-shim-runc-v2/bundles/%s/task.json"},
		containers[1]: {"records/%s.json", "records/%s.copy"},
		p.id:          {"records/%s.json", "records/%s.copy"},
	}
	shim := parentOf(t, p.pausePID())
	dir := supervisorDirs(t, n)[0]
	n.Kill()
	p.killShim()
	for id, files := range spoilt {
		for _, file := range files {
			check(t, os.Truncate(filepath.Join(dir, fmt.Sprintf(file, id)), 1))
		}
	}
	n.Start()
	for _, id := range containers {
		check(t, p.remove(id))
		if states := statesOf(t, n, "task/*/runc/minicri", id); states != 0 {
			t.Errorf("runc has %d states of the container, want none", states)
		}
	}
	n.RemovePod(p.id)
	eventually(t, "the shim has ended", func() bool { return programOf(t, shim) == "" })
}

func parentOf(t *testing.T, pid int) int {
	t.Helper()
	status, err := os.ReadFile(fmt.Sprintf("/proc/%d/status", pid))
	check(t, err)
	_, rest, _ := strings.Cut(string(status), "PPid:")
	parent, err := strconv.Atoi(strings.Fields(rest)[0])
	check(t, err)
	return parent
}

// programOf is the name of the file that a process runs, "" if it is gone.
func programOf(t *testing.T, pid int) string {
	t.Helper()
	path, err := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	if err != nil {
		return ""
	}
	return filepath.Base(path)
}

// A handler has options of its own, which its pods alone have.
func TestHandlerOptions(t *testing.T) {
	base := filepath.Join(t.TempDir(), "base.json")
	check(t, os.WriteFile(base, []byte(`{"process": {"env": ["OF_BASE=base"]}}`), 0o644))
	n := newNode(t, harness.Config(fmt.Sprintf("[runtimes.strict]\ntype = 'builtin'\nprivileged_without_host_devices = true\n"+
		"pod_annotations = ['pass.example/*']\nbase_spec = '%s'", base)))
	privileged := func(c *runtimeapi.ContainerConfig) { c.Linux.SecurityContext.Privileged = true }
	for handler, want := range map[string]string{"strict": "0 base", "": "1"} {
		config := n.PodConfig("pod-"+handler, func(c *runtimeapi.PodSandboxConfig) {
			c.Annotations = map[string]string{"pass.example/a": "b"}
			c.Linux.SecurityContext.Privileged = true
		})
		answer, err := n.Runtime.RunPodSandbox(limited(t), &runtimeapi.RunPodSandboxRequest{Config: config, RuntimeHandler: handler})
		check(t, err)
		p := &pod{Node: n, t: t, id: answer.PodSandboxId, config: config}
		same(t, handler+": kmsg, base", p.output("app", "echo $(ls /dev/kmsg 2>/dev/null | wc -l) $OF_BASE", privileged), want)
		passed := p.annotations(p.run("other", forever))["pass.example/a"]
		if (passed == "b") != (handler == "strict") {
			t.Errorf("handler %q: the annotation is %q", handler, passed)
		}
	}
}
