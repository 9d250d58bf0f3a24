package container

import (
	"bufio"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"testing"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// useBuild kills the daemon and starts one with the node's build of the shim, or, with
// a mark, another. A node has to end with the build that it began with.
func useBuild(t *testing.T, n *nodetest.Node, mark ...byte) (shim string) {
	shim = filepath.Join(n.Binaries(), "minicri-shim")
	if len(mark) > 0 {
		content := harness.Read(t, shim)
		shim = filepath.Join(t.TempDir(), "minicri-shim")
		check(t, os.WriteFile(shim, append(content, mark...), 0o755))
	}
	n.Kill()
	n.SetFlags("--shim", shim)
	n.Start()
	return shim
}

type built struct {
	runs
	dir             string // of its supervisor
	terminal, stdin string
}

func startBuilt(t *testing.T, n *nodetest.Node, i int) built {
	b := built{runs: startRuns(t, n, i)}
	const echo = "while read line; do echo got $line; done"
	b.stdin = b.run("stdin", echo, func(c *runtimeapi.ContainerConfig) { c.Stdin = true })
	b.terminal = b.run("terminal", echo, func(c *runtimeapi.ContainerConfig) { c.Stdin, c.Tty = true, true })
	b.dir = filepath.Dir(filepath.Dir(harness.Glob(t, n.State, "shims", "*", "records", b.lives+".json")[0]))
	return b
}

func (b built) talk(t *testing.T, id, word string) {
	t.Helper()
	c, err := client.Connect(harness.Limited(t), b.dir, new(atomic.Int64))
	check(t, err)
	defer c.Close()
	output, err := c.Stream(harness.Limited(t), id, "", api.Stdout)
	check(t, err)
	defer output.Close()
	input, err := c.Stream(harness.Limited(t), id, "", api.Stdin)
	check(t, err)
	defer input.Close()
	_, err = fmt.Fprintln(input, word)
	check(t, err)
	for lines := bufio.NewScanner(output); lines.Scan(); {
		if strings.Contains(lines.Text(), "got "+word) {
			return
		}
	}
	t.Errorf("container %s does not answer %q", id, word)
}

// Supervisors of three builds serve beside each other, also when the daemon is killed, and each ends with its last pod.
func TestSupervisorsOfThreeBuilds(t *testing.T) {
	n := newNode(t)
	all := []built{startBuilt(t, n, 0)}
	for i := range 2 {
		useBuild(t, n, byte(i))
		all = append(all, startBuilt(t, n, i+1))
	}
	same(t, "supervisors and their directories", []int{len(n.Supervisors()), len(supervisorDirs(t, n))}, []int{3, 3})
	for i, b := range all {
		b.talk(t, b.terminal, "terminal")
		b.talk(t, b.stdin, "stdin")
		same(t, "exec", b.exec(b.lives, "echo hi"), "hi")
		if i == 1 {
			n.Crash()
		}
	}
	check(t, os.WriteFile(filepath.Join(n.State, "shims", "no-directory"), nil, 0o600))
	wide, err := n.RunCommand("pods", "--wide")
	check(t, errors.Join(err, os.Remove(filepath.Join(n.State, "shims", "no-directory"))))
	expect(t, strings.Count(wide, "supervisor of build ") == 2, "not two older supervisors:\n%s", wide)
	for _, b := range all[:2] {
		line := "supervisor of build " + filepath.Base(b.dir) + ", version "
		expect(t, strings.Contains(wide, line), "%q is not in\n%s", line, wide)
	}
	for i, b := range all {
		b.wantUndisturbed(t, i)
		b.talk(t, b.terminal, "again")
		b.talk(t, b.stdin, "again")
		n.RemovePod(b.id)
		if i < 2 { // its own build's stays
			harness.Eventually(t, "the supervisor ends with its last pod", func() bool {
				_, err := os.Stat(b.dir)
				return os.IsNotExist(err) && len(n.Supervisors()) == 2-i
			})
		}
	}
	useBuild(t, n)
}

// The starters of an older build's supervisor are of the daemon's build: what it mends reaches the next exec there,
// too. When that supervisor dies, this build's program takes its place.
func TestSupervisorOfAnOlderBuild(t *testing.T) {
	n := newNode(t)
	b := startRuns(t, n, 0)
	old := n.Supervisors()[0]
	build, err := client.BuildOf(useBuild(t, n, 1))
	check(t, err)
	harness.Eventually(t, "a starter of the daemon's build waits", func() bool { return slices.Contains(startersOf(old), build) })
	same(t, "exec", b.exec(b.lives, "echo hi"), "hi")
	newer := runPod(t, n, "newer")
	id := newer.run("app", forever)
	check(t, unix.Kill(old, unix.SIGKILL))
	b.awaitExecs(b.lives)
	b.wantUndisturbed(t, 0)
	same(t, "exec", newer.exec(id, "echo hi"), "hi")
	n.RemovePod(b.id)
	harness.Eventually(t, "it ends with its last pod", func() bool { return len(n.Supervisors()) == 1 && len(supervisorDirs(t, n)) == 1 })
	n.RemovePod(newer.id)
	useBuild(t, n)
}

func startersOf(supervisor int) (builds []string) {
	lines, _ := filepath.Glob("/proc/[0-9]*/cmdline")
	for _, path := range lines {
		line, _ := os.ReadFile(path) // it may have ended
		pid, _ := strconv.Atoi(strings.Split(path, "/")[2])
		stat, err := process.ReadStat(pid)
		if err == nil && stat.Parent == supervisor && strings.HasPrefix(string(line), "minicri-shim\x00start\x00") {
			build, _ := client.BuildOf(filepath.Join(filepath.Dir(path), "exe"))
			builds = append(builds, build)
		}
	}
	return builds
}

// Pods of a build that this one cannot serve are listed as they were last known, nothing
// is done to them, and it is said which build can serve them: where it does not know the
// protocol of their supervisor, and where that has died, what it has written.
func TestBuildThatIsNotKnown(t *testing.T) {
	t.Run("protocol", func(t *testing.T) { leavesAlone(t, func(about *api.About, _ int) { about.Protocol = 99 }) })
	t.Run("records", func(t *testing.T) {
		leavesAlone(t, func(about *api.About, supervisor int) {
			about.Records = 99
			check(t, unix.Kill(supervisor, unix.SIGKILL))
		})
	})
}

func leavesAlone(t *testing.T, change func(about *api.About, supervisor int)) {
	n := newNode(t)
	p := runPod(t, n, "pod")
	id := p.run("app", forever)
	pid, dir := p.info(id).PID, supervisorDirs(t, n)[0]
	lost := p.run("lost", forever) // its facts: nobody can say that it does not run
	n.Kill()
	check(t, os.Remove(filepath.Join(n.Root, "container-facts", lost+".json")))
	known := harness.Read(t, filepath.Join(dir, api.AboutFile))
	other, err := api.ReadAbout(dir)
	check(t, err)
	other.Version = "9.9.9"
	change(other, n.Supervisors()[0])
	content, err := json.Marshal(other)
	check(t, err)
	check(t, os.WriteFile(filepath.Join(dir, api.AboutFile), content, 0o600))
	useBuild(t, n, 1)

	same(t, "state", p.status(id).State, running)
	wantCode(t, p.execErr(id, "true"), codes.FailedPrecondition)
	wantCode(t, p.stop(id, 60), codes.FailedPrecondition)
	wantCode(t, p.remove(id), codes.FailedPrecondition)
	wantCode(t, p.stopPod(), codes.FailedPrecondition)
	wantCode(t, p.removePod(), codes.FailedPrecondition)
	check(t, unix.Kill(pid, 0))
	answer := nodetest.Call(t, n.Runtime.Status, &runtimeapi.StatusRequest{Verbose: true})
	checked, _ := n.RunCommand("check") // fails, because of this
	for what, said := range harness.Sorted(map[string]string{"Status": fmt.Sprint(answer.Status.Conditions), "info": answer.Info["olderSupervisors"], "check": checked}) {
		for _, word := range []string{"9.9.9", filepath.Base(dir)} {
			expect(t, strings.Contains(said, word), "%s does not say which build can serve the pod, %s: %s", what, word, said)
		}
	}
	check(t, os.WriteFile(filepath.Join(dir, api.AboutFile), known, 0o600))
	p.awaitExecs(id)
	useBuild(t, n)
	p.awaitExecs(lost)
}
