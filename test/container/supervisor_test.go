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
	"time"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
	"github.com/minicri/minicri/test/harness"
	"github.com/minicri/minicri/test/nodetest"
)

// A supervisor that hangs is found by a call that is not answered, killed and replaced.
// Meanwhile ExecSync's time-out holds, containers are stopped and pods removed by the first
// call, and the daemon starts and ends without waiting for it.
func TestHungSupervisor(t *testing.T) {
	p := newPod(t)
	id, other, gone := p.run("app", forever), p.run("other", forever), runPod(t, p.Node, "gone")
	gone.run("app", forever)
	hang := func() (pid int) {
		pid = p.Node.Supervisors()[0]
		harness.Freeze(t, pid)
		return pid
	}
	wantReplaced := func(hung int) {
		harness.Eventually(t, "it is adopted", func() bool { return p.status(id).State == running })
		same(t, "exec", p.exec(id, "echo hi"), "hi")
		same(t, "supervisors", len(p.Node.Supervisors()), 1)
		expect(t, p.Node.Supervisors()[0] != hung, "the one that hung, %d, is still there", hung)
	}
	pid := hang()
	_, err := p.tryExec(id, 1, "true")
	wantError(t, err)
	check(t, p.stop(other, 1))
	same(t, "state after the stop", p.status(other).State, exited)
	wantReplaced(pid)

	pid = hang()
	check(t, gone.removePod())
	wantReplaced(pid)

	p.Kill()
	pid = hang()
	p.Start()                           // the daemon checks supervisors when it connects, and replaces this one
	checked, _ := p.RunCommand("check") // the pod by which the daemon proves that it can make one waits for it
	expect(t, !strings.Contains(checked, "has no pod"), "a pod that is being made is taken for a leak:\n%s", checked)
	wantReplaced(pid)

	hang()
	removed := beside(func() error { return p.remove(id) }) // its daemon ends
	p.Stop()
	<-removed
	p.Start()
	check(t, p.remove(id))
}

// A supervisor that cannot be started for longer than any limit, for want of space or memory for example, serves
// when it can, without any call: what ended meanwhile is told.
func TestSupervisorThatCannotStartForAWhile(t *testing.T) {
	p := runPod(t, newNode(t, nodetest.Config("[limits]\ncreate = '5s'")), "web")
	lives, dies := p.run("lives", forever), p.run("dies", untilGo+"exit 7")
	pid := p.info(dies).PID
	lock := filepath.Join(supervisorDirs(t, p.Node)[0], "lock")
	check(t, os.Rename(lock, lock+".old"))
	check(t, os.Mkdir(lock, 0o700)) // cannot be opened as a lock
	p.killShim()
	harness.Eventually(t, "it is seen that no supervisor serves", func() bool { return p.status(lives).State == runtimeapi.ContainerState_CONTAINER_UNKNOWN })
	release(t, pid)
	awaitGone(t, pid)
	wantError(t, p.createErr(shell("late", forever))) // at the limit
	removed := time.Now()
	check(t, os.Remove(lock))
	harness.Eventually(t, "it runs under a successor", func() bool { return p.status(lives).State == running })
	p.wantExit(dies, 7, "Error")
	at := time.Unix(0, p.status(dies).FinishedAt)
	expect(t, at.Before(removed), "it has ended %v after a supervisor could be started", at.Sub(removed))
	check(t, os.Remove(lock+".old"))
}

func supervisorDirs(t *testing.T, n *nodetest.Node) []string {
	return harness.Glob(t, n.State, "shims", "*")
}

// whole reports whether a long test runs as a whole, which make test-supervisor asks for.
func whole() bool { return os.Getenv("MINICRI_TEST_WHOLE") != "" }

type runs struct {
	*pod
	lives, writes, waits, dies string
	pid                        int
}

const lines = 4000

func startRuns(t *testing.T, n *nodetest.Node, i int) runs {
	r := runs{pod: runPod(t, n, fmt.Sprint("pod-", i))}
	r.lives = r.run("lives", forever)
	r.writes = r.run("writes", fmt.Sprintf("i=0; while [ $i -lt %d ]; do printf 'line '; echo $i; i=$((i+1)); done; exec sleep 1000000", lines))
	r.waits = r.create(shell("waits", fmt.Sprintf("exit %d", 50+i%50)))
	r.dies = r.run("dies", fmt.Sprintf("sleep 2; exit %d", 100+i%50))
	r.pid = r.info(r.lives).PID
	return r
}

// wantUndisturbed looks at the containers after the supervisor was replaced.
func (r runs) wantUndisturbed(t *testing.T, i int) {
	harness.Eventually(t, "the state is known", func() bool { return r.status(r.lives).State == running })
	same(t, "pid of the container that lives", r.info(r.lives).PID, r.pid)
	r.wantExit(r.dies, int32(100+i%50), "Error")
	// The daemon asks the successor about one container after the other.
	harness.Eventually(t, "what waits is known again", func() bool { return r.status(r.waits).State == created })
	check(t, r.start(r.waits))
	r.wantExit(r.waits, int32(50+i%50), "Error")
	same(t, "exec", r.exec(r.lives, "echo hi"), "hi")
	want := strings.Builder{}
	for i := range lines {
		fmt.Fprintf(&want, "line %d\n", i)
	}
	harness.Eventually(t, "all lines are in the log", func() bool { return len(r.stdout(r.writes)) >= want.Len() })
	same(t, "log", r.stdout(r.writes), want.String())
}

// A supervisor is killed under many pods: who comes next serves them all, and what it cannot know it does not make up.
func TestKilledUnderManyPods(t *testing.T) {
	count := 6
	if whole() {
		count = 100
	}
	n := newNode(t)
	var all []runs
	for i := range count {
		all = append(all, startRuns(t, n, i))
	}
	all[0].killShim()
	all[0].awaitExecs(all[0].lives)
	for i, r := range all {
		r.wantUndisturbed(t, i)
	}
	for _, r := range all {
		check(t, r.stopPod())
	}
}

// untilGo begins a script that waits for release.
const untilGo = "until [ -e /go ]; do sleep 0.05; done; "

func release(t *testing.T, pid int) {
	check(t, os.WriteFile(fmt.Sprintf("/proc/%d/root/go", pid), nil, 0o600))
}

func awaitGone(t *testing.T, pid int) {
	harness.Eventually(t, "the process has ended and is reaped", func() bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) })
}

func TestP34_DaemonKilledWhileContainersRun(t *testing.T) {
	p := newPod(t)
	lives := p.run("lives", forever)
	waits := p.create(shell("waits", "exit 5"))
	dies := p.run("dies", untilGo+"exit 33")
	oom := p.run("oom", untilGo+"tail /dev/zero", memory(16<<20))
	ended := p.run("ended", "exit 4")
	p.wantExit(ended, 4, "Error")
	before, pid := p.status(ended), p.info(lives).PID
	ending := []int{p.info(dies).PID, p.info(oom).PID}
	p.Kill()
	killed := time.Now()
	for _, pid := range ending {
		release(t, pid)
		awaitGone(t, pid)
	}
	p.Start()
	started := time.Now()
	for id, state := range harness.Sorted(map[string]runtimeapi.ContainerState{lives: running, waits: created, dies: exited, oom: exited, ended: exited}) {
		same(t, "state at once", p.status(id).State, state)
	}
	p.wantExit(dies, 33, "Error")
	p.wantExit(oom, 137, "OOMKilled")
	at := time.Unix(0, p.status(dies).FinishedAt)
	expect(t, !at.Before(killed) && !at.After(started), "finished at %v, the daemon was gone from %v to %v", at, killed, started)
	same(t, "status of the one that had ended", p.status(ended), before)
	expect(t, p.info(lives).PID == pid && p.exec(lives, "echo hi") == "hi", "process %d, was %d", p.info(lives).PID, pid)
	check(t, p.start(waits))
	p.wantExit(waits, 5, "Error")
	check(t, p.stop(lives, 10))
	p.wantExit(lives, 10, "Error")
}

// A supervisor that dies, with the daemon or alone, is replaced by one that adopts its
// containers, and that knows how one has ended meanwhile, or that it does not know. What the
// dead one has left of containers that ended before keeps no one from removing them.
//
// cri: ContainerStatus.reason ContainerStatus.exit_code RemoveContainerRequest.container_id
func TestKilledShim(t *testing.T) {
	for name, withDaemon := range harness.Sorted(map[string]bool{"alone": false, "with the daemon": true}) {
		t.Run(name, func(t *testing.T) {
			p := newPod(t)
			lives, dies, ended := p.run("lives", forever), p.run("dies", untilGo+"exit 3"), p.run("ended", "exit 1")
			waits := p.create(shell("waits", "exit 5"))
			p.wantExit(ended, 1, "Error")
			pid := p.info(dies).PID
			if withDaemon {
				p.Kill()
			}
			p.killShim()
			release(t, pid)
			if withDaemon {
				p.Start()
				check(t, p.remove(ended))
			} else {
				harness.Eventually(t, "the daemon notices", func() bool { return strings.Contains(p.Log(), "a supervisor is gone") })
			}
			harness.Eventually(t, "both are adopted, by themselves", func() bool { return p.status(lives).State == running && p.status(waits).State == created })
			same(t, "exec", p.exec(lives, "echo hi"), "hi")
			if end := p.awaitExit(dies); !withDaemon || end.ExitCode != 255 || end.Reason != "Unknown" {
				p.wantExit(dies, 3, "Error")
			}
			check(t, p.start(waits))
			p.awaitExit(waits)
			check(t, p.stop(lives, 10))
			for _, id := range []string{lives, dies, waits, ended} {
				check(t, p.remove(id))
			}
			p.wantExit(p.run("lives", "exit 6"), 6, "Error")
			p.RemovePod(p.id)
		})
	}
}

// A container of which nothing can be read that supervisors keep runs on, and is not
// said to have ended: it is unknown what it does, and it can be stopped and removed.
func TestContainerThatNoSupervisorKnows(t *testing.T) {
	p := newPod(t)
	stopped, known := p.run("stopped", forever), p.run("known", forever)
	pid := p.info(stopped).PID
	dir := supervisorDirs(t, p.Node)[0]
	facts := filepath.Join(p.Root, "container-facts", known+".json")
	p.Kill()
	written, err := os.Stat(facts)
	check(t, err)
	p.killShim()
	check(t, os.Truncate(filepath.Join(dir, "records", stopped+".json"), 1))
	p.Start()
	harness.Eventually(t, "the other one is adopted", func() bool { return p.status(known).State == running })
	same(t, "its state", p.status(stopped).State, runtimeapi.ContainerState_CONTAINER_UNKNOWN)
	check(t, unix.Kill(pid, 0))
	check(t, p.stop(stopped, 1))
	same(t, "state when it is stopped", p.status(stopped).State, exited)
	awaitGone(t, pid)
	check(t, p.remove(stopped))
	same(t, "exec in the other one", p.exec(known, "echo hi"), "hi")
	now, err := os.Stat(facts) // are written when they change, and at no other time
	check(t, err)
	same(t, "when its facts were written", now.ModTime(), written.ModTime())
}

// A container whose record or facts cannot be read runs on, and is what it was when
// the file is back; one whose facts are gone is what its supervisor knows of it.
func TestWhatIsNoFileCostsNoContainer(t *testing.T) {
	p := newPod(t)
	files, ids, pids := map[string]string{}, map[string]string{}, map[string]int{}
	for name, dir := range harness.Sorted(map[string]string{"record": "containers", "facts": "container-facts", "gone": "container-facts", "null": "container-facts"}) {
		ids[name] = p.run(name, forever)
		files[name] = filepath.Join(p.Root, dir, ids[name]+".json")
		pids[name] = p.info(ids[name]).PID
	}
	p.Kill()
	for _, name := range []string{"record", "facts"} {
		check(t, os.Rename(files[name], files[name]+".aside"))
		check(t, os.Mkdir(files[name], 0o700))
	}
	check(t, os.Remove(files["gone"]))
	check(t, os.WriteFile(files["null"], []byte(`{"version": 1, "record": null}`), 0o600))
	p.Start()
	for _, pid := range pids {
		check(t, unix.Kill(pid, 0))
	}
	for _, name := range []string{"facts", "gone", "null"} {
		harness.Eventually(t, name+" is listed", func() bool { return p.status(ids[name]).State == running })
		same(t, name, p.info(ids[name]).PID, pids[name])
		same(t, "exec in "+name, p.exec(ids[name], "echo hi"), "hi")
	}
	wantFound(t, p.Node, files["record"], "quarantine")
	p.Kill()
	for _, name := range []string{"record", "facts"} {
		check(t, os.RemoveAll(files[name]))
		check(t, os.Rename(files[name]+".aside", files[name]))
	}
	p.Start()
	for name, id := range ids {
		harness.Eventually(t, name+" is listed again", func() bool { return p.status(id).State == running })
		same(t, name, p.info(id).PID, pids[name])
	}
	_, err := p.RunCommand("check", "--fix", "--force") // what is in quarantine
	check(t, err)
}

// A killed supervisor that the kernel keeps, because it writes a log to a disk that hangs, has the lock of all pods.
// Its successor serves the others meanwhile.
func TestSupervisorThatCannotEnd(t *testing.T) {
	disk := t.TempDir()
	freeze := harness.Disk(t, disk)
	n := newNode(t)
	loud := runPod(t, n, "loud", func(c *runtimeapi.PodSandboxConfig) { c.LogDirectory = disk })
	quiet := runPod(t, n, "quiet")
	logs := loud.run("logs", "while true; do echo more; sleep 0.01; done")
	id, killed := quiet.run("quiet", forever), n.Supervisors()[0]
	thaw := freeze()
	harness.Eventually(t, "a write of the supervisor hangs", func() (hangs bool) {
		for _, thread := range harness.Glob(t, fmt.Sprintf("/proc/%d/task/*/stat", killed)) {
			stat, _ := os.ReadFile(thread)
			hangs = hangs || strings.Contains(string(stat), ") D ")
		}
		return hangs
	})
	check(t, unix.Kill(killed, unix.SIGKILL))
	harness.Eventually(t, "another pod's exec is served", func() bool {
		_, err := quiet.tryExec(id, 10, "true")
		return err == nil
	})
	harness.Need(t, process.Doomed(killed), "process %d has ended: this proves nothing", killed)
	thaw()
	same(t, "the loud one after that", loud.exec(logs, "echo hi"), "hi")
	check(t, errors.Join(loud.stopPod(), loud.removePod()))
}

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
	output, err := c.Attach(harness.Limited(t), id, api.Stdout)
	check(t, err)
	defer output.Close()
	input, err := c.Attach(harness.Limited(t), id, api.Stdin)
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
