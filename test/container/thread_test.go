package container

import (
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// tool is a mount of testdata/process.c, compiled.
func tool(t *testing.T) option {
	program := filepath.Join(t.TempDir(), "process")
	out, err := exec.Command("gcc", "-O1", "-static", "-pthread", "-o", program, "testdata/process.c").CombinedOutput()
	harness.Need(t, err == nil, "gcc: %v: %s", err, out)
	// A pod with a user namespace walks through it.
	for dir := filepath.Dir(program); dir != filepath.Clean(os.TempDir()); dir = filepath.Dir(dir) {
		info, err := os.Stat(dir)
		check(t, err)
		check(t, os.Chmod(dir, info.Mode()|0o011))
	}
	return mounted(program, "/process")
}

func tty(c *runtimeapi.ContainerConfig) { c.Stdin, c.Tty = true, true }

// A program may ask for a signal when its parent ends, as a first process and in an exec, by both ways of exec.
func TestProgramsThatDieWithTheirParent(t *testing.T) {
	n, program := newNode(t), tool(t)
	for _, users := range []struct {
		name    string
		options []nodetest.PodOption
	}{{name: "launched"}, {"by-a-starter", []nodetest.PodOption{nodetest.UserNamespace}}} {
		p := runPod(t, n, users.name, users.options...)
		first := p.run("first", "", program, command("/process", "die-with-parent"))
		id := p.run("app", forever, program)
		var execs sync.WaitGroup
		for range 10 {
			execs.Go(func() {
				answer, err := p.tryExec(id, 0, "/process", "die-with-parent")
				lived := err == nil && answer.ExitCode == 0 && string(answer.Stdout) == "lived\n"
				expect(t, lived, "%s: %v, %v", users.name, answer, err)
			})
		}
		execs.Wait()
		p.wantExit(first, 0, "Completed")
		// No starter stays.
		one := func() bool { return len(startersOf(n.Supervisors()[0])) <= 1 }
		harness.Eventually(t, "the starters have ended", one)
	}
}

// A first process whose first thread has ended, or that executed its program in another thread, runs like any other.
func TestFirstThreadThatEnded(t *testing.T) {
	n, program := newNode(t), tool(t)
	for _, users := range []struct {
		name    string
		options []nodetest.PodOption
	}{{name: "launched"}, {"by-a-starter", []nodetest.PodOption{nodetest.UserNamespace}}} {
		p := runPod(t, n, users.name, users.options...)
		for _, test := range []struct {
			name    string
			command []string
		}{
			{"another-thread", []string{"/process", "thread", "/bin/sh", "-c", forever}},
			{"first-thread-ended", []string{"/process", "first-thread-ends"}},
			{"first-thread-ended-and-exec", []string{"/process", "first-thread-ends", "/bin/sh", "-c", forever}},
		} {
			id := p.run(test.name, "", program, command(test.command...), memory(64<<20))
			p.awaitLine(id, "ready")
			same(t, test.name+": an exec", p.exec(id, "echo hi; hostname"), "hi\n"+users.name)
			update := &runtimeapi.LinuxContainerResources{MemoryLimitInBytes: 128 << 20}
			request := &runtimeapi.UpdateContainerResourcesRequest{ContainerId: id, Linux: update}
			check(t, nodetest.Err(t, p.Runtime.UpdateContainerResources, request))
			same(t, test.name+": an exec after the update", p.exec(id, "echo hi"), "hi")
			expect(t, p.status(id).State == running, "%s: it is %v", test.name, p.status(id))
			check(t, p.stop(id, 0))
			p.wantExit(id, 137, "Error")
		}
	}
}

// A program may close its terminal and open it again, by each of its names, alone and in a pod with one pid namespace.
func TestTerminalThatIsOpenedAgain(t *testing.T) {
	n := newNode(t)
	shared := func(c *runtimeapi.PodSandboxConfig) {
		c.Linux.SecurityContext.NamespaceOptions.Pid = runtimeapi.NamespaceMode_POD
	}
	for _, pids := range []struct {
		name    string
		options []nodetest.PodOption
	}{{name: "own"}, {"shared", []nodetest.PodOption{shared}}} {
		p := runPod(t, n, pids.name, pids.options...)
		for _, terminal := range []string{"/dev/console", "/dev/tty"} {
			const script = "exec <&- >&- 2>&-; for i in 1 2 3; do usleep 20000; echo line $i >TERMINAL; done\n" +
				"exec >TERMINAL <TERMINAL; echo end; read x; echo got $x"
			ofThePod := func(c *runtimeapi.ContainerConfig) {
				if len(pids.options) > 0 {
					pod := &runtimeapi.NamespaceOption{Pid: runtimeapi.NamespaceMode_POD}
					c.Linux.SecurityContext.NamespaceOptions = pod
				}
			}
			id := p.run(filepath.Base(terminal), strings.ReplaceAll(script, "TERMINAL", terminal), tty, ofThePod)
			harness.Eventually(t, "all lines are in the log", func() bool {
				return p.stdout(id) == "line 1\r\nline 2\r\nline 3\r\nend\r\n"
			})
			check(t, p.stop(id, 0))
			p.wantExit(id, 137, "Error")
		}
	}
}
