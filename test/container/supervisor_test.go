package container

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/process"
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
