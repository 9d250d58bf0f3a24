package container

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/harness"
)

// A supervisor that hangs is found by a call that is not answered, killed and replaced.
// Meanwhile ExecSync's time-out holds, containers are stopped and pods removed by the first
// call, and the daemon starts and ends without waiting for it.
func TestHungSupervisor(t *testing.T) {
	p := newPod(t)
	id, other, gone := p.run("app", forever), p.run("other", forever), runPod(t, p.Node, "gone")
	gone.run("app", forever)
	hang := func() (pid int) {
		pid = shims(p.Node)[0]
		check(t, unix.Kill(pid, unix.SIGSTOP))
		t.Cleanup(func() { _ = unix.Kill(pid, unix.SIGCONT) })
		return pid
	}
	wantReplaced := func(hung int) {
		t.Helper()
		eventually(t, "it is adopted", func() bool { return p.status(id).State == running })
		same(t, "exec", p.exec(id, "echo hi"), "hi")
		if now := shims(p.Node); len(now) != 1 || now[0] == hung {
			t.Errorf("supervisors: %v, the one that hung is %d", now, hung)
		}
	}
	pid := hang()
	if err := p.inTime(30*time.Second, func() error { _, err := p.tryExec(id, 1, "true"); return err }); err == nil {
		t.Error("an exec by a supervisor that hangs succeeded")
	}
	check(t, p.stop(other, 1))
	same(t, "state after the stop", p.status(other).State.String(), exited.String())
	wantReplaced(pid)

	pid = hang()
	check(t, p.inTime(60*time.Second, gone.removePod))
	wantReplaced(pid)

	p.Kill()
	pid = hang()
	p.Start()
	if now := shims(p.Node); len(now) != 1 || now[0] != pid {
		t.Errorf("the daemon waited until the supervisor that hangs was replaced: %v", now)
	}
	wantReplaced(pid)

	hang()
	removed := make(chan struct{})
	go func() {
		defer close(removed)
		_ = p.remove(id) // its daemon ends
	}()
	time.Sleep(100 * time.Millisecond)
	p.Stop()
	<-removed
	p.Start()
	check(t, p.remove(id))
}

// What an exec has started goes when its supervisor dies: no one holds its
// streams any more.
func TestExecsOfAKilledSupervisor(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	failed := make(chan error, 1)
	go func() {
		_, err := p.tryExec(id, 300, "sleep", "7779")
		failed <- err
	}()
	has := func() bool { return len(processesWithArgument(t, "7779")) > 0 }
	eventually(t, "the exec runs", has)
	p.killShim()
	if err := <-failed; err == nil {
		t.Error("the exec of a killed supervisor succeeded")
	}
	eventually(t, "the exec is ended", func() bool { return !has() })
}

// A supervisor that cannot be started for longer than any limit, for want of space
// or memory for example, serves when it can, without any call: what ended
// meanwhile is told.
func TestSupervisorThatCannotStartForAWhile(t *testing.T) {
	const limit = 5 * time.Second
	p := runPod(t, newNode(t, harness.Config("[limits]\ncreate = '5s'")), "web")
	lives, dies := p.run("lives", forever), p.run("dies", untilGo+"exit 7")
	pid := p.info(dies).PID
	lock := filepath.Join(supervisorDirs(t, p.Node)[0], "lock")
	check(t, os.Rename(lock, lock+".old"))
	check(t, os.Mkdir(lock, 0o700)) // cannot be opened as a lock
	p.killShim()
	eventually(t, "it is seen that no supervisor serves", func() bool { return p.status(lives).State == runtimeapi.ContainerState_CONTAINER_UNKNOWN })
	release(t, pid)
	eventually(t, "it has ended and its parent has seen it", func() bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) })
	over := time.Now()
	time.Sleep(limit + time.Second)
	check(t, os.Remove(lock))
	eventually(t, "it runs under a successor", func() bool { return p.status(lives).State == running })
	p.wantExit(dies, 7, "Error")
	if at := time.Unix(0, p.status(dies).FinishedAt); at.After(over.Add(limit)) {
		t.Errorf("it has ended %v after its process", at.Sub(over))
	}
	check(t, os.Remove(lock+".old"))
}

// supervisorDirs are the directories of the node's supervisors.
func supervisorDirs(t *testing.T, n *harness.Node) []string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(n.State, "shims", "*"))
	check(t, err)
	return dirs
}
