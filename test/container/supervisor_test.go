package container

import (
	"errors"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/supervisor/client"
	"github.com/minicri/minicri/test/harness"
)

// A supervisor that hangs is found by a call that is not answered, killed and
// replaced; ExecSync's time-out holds meanwhile, and StopContainer works.
func TestHungSupervisor(t *testing.T) {
	p := newPod(t)
	id, other := p.run("app", forever), p.run("other", forever)
	pid := shims(p.Node)[0]
	check(t, unix.Kill(pid, unix.SIGSTOP))
	defer func() { _ = unix.Kill(pid, unix.SIGCONT) }()
	began := time.Now()
	_, err := p.Runtime.ExecSync(limited(t), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}, Timeout: 1})
	if err == nil || time.Since(began) > 30*time.Second {
		t.Errorf("exec by a supervisor that hangs: %v after %v", err, time.Since(began))
	}
	check(t, p.stop(other, 1))
	if state := p.status(other).State; state != exited {
		t.Errorf("after stop: %v", state)
	}
	eventually(t, "the other one is adopted", func() bool { return p.status(id).State == running })
	same(t, "exec", p.exec(id, "echo hi"), "hi")
	if now := shims(p.Node); len(now) != 1 || now[0] == pid {
		t.Errorf("supervisors: %v, the one that hung is %d", now, pid)
	}
}

// A supervisor that hangs keeps neither a pod from being removed, by the first
// call, nor the daemon from ending.
func TestRemovalBesideAHungSupervisor(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	gone := runPod(t, p.Node, "gone")
	gone.run("app", forever)
	stopAll := func() {
		for _, pid := range shims(p.Node) {
			check(t, unix.Kill(pid, unix.SIGSTOP))
			t.Cleanup(func() { _ = unix.Kill(pid, unix.SIGCONT) })
		}
	}
	stopAll()
	check(t, p.inTime(60*time.Second, func() error {
		_, err := p.Runtime.RemovePodSandbox(limited(t), &runtimeapi.RemovePodSandboxRequest{PodSandboxId: gone.id})
		return err
	}))
	eventually(t, "the other pod is adopted", func() bool { return p.status(id).State == running })
	same(t, "exec", p.exec(id, "echo hi"), "hi")

	stopAll()
	removed := make(chan struct{})
	go func() {
		defer close(removed)
		_, _ = p.Runtime.RemoveContainer(limited(t), &runtimeapi.RemoveContainerRequest{ContainerId: id}) // its daemon ends
	}()
	time.Sleep(100 * time.Millisecond)
	p.Stop()
	<-removed
	p.Start()
	check(t, p.remove(id))
}

// The start of the daemon does not wait for a supervisor that hangs.
func TestDaemonStartsBesideAHungSupervisor(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	p.Kill()
	pid := shims(p.Node)[0]
	check(t, unix.Kill(pid, unix.SIGSTOP))
	defer func() { _ = unix.Kill(pid, unix.SIGCONT) }()
	p.Start()
	if now := shims(p.Node); len(now) != 1 || now[0] != pid {
		t.Errorf("the daemon waited until the supervisor that hangs was replaced: %v", now)
	}
	eventually(t, "adopted", func() bool { return p.status(id).State == running })
	same(t, "exec", p.exec(id, "echo hi"), "hi")
}

// What an exec has started goes when its supervisor dies: no one holds its
// streams any more.
func TestExecsOfAKilledSupervisor(t *testing.T) {
	p := newPod(t)
	id := p.run("app", forever)
	failed := make(chan error, 1)
	go func() {
		_, err := p.Runtime.ExecSync(limited(t), &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"sleep", "7779"}, Timeout: 300})
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
	for _, dir := range supervisorDirs(t, p.Node) {
		lock := filepath.Join(dir, "lock")
		check(t, os.Rename(lock, lock+".old"))
		check(t, os.Mkdir(lock, 0o700)) // cannot be opened as a lock
	}
	for _, pid := range shims(p.Node) {
		check(t, unix.Kill(pid, unix.SIGKILL))
	}
	eventually(t, "it is seen that no supervisor serves", func() bool { return p.status(lives).State == runtimeapi.ContainerState_CONTAINER_UNKNOWN })
	release(t, pid)
	eventually(t, "it has ended and its parent has seen it", func() bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) })
	over := time.Now()
	time.Sleep(limit + time.Second)
	for _, dir := range supervisorDirs(t, p.Node) {
		check(t, os.Remove(filepath.Join(dir, "lock")))
	}
	eventually(t, "it runs under a successor", func() bool { return p.status(lives).State == running })
	p.wantExit(dies, 7, "Error")
	if at := time.Unix(0, p.status(dies).FinishedAt); at.After(over.Add(limit)) {
		t.Errorf("it has ended %v after its process", at.Sub(over))
	}
	for _, dir := range supervisorDirs(t, p.Node) {
		_ = os.Remove(filepath.Join(dir, "lock.old"))
	}
}

// supervisorDirs are the directories of the node's supervisors.
func supervisorDirs(t *testing.T, n *harness.Node) []string {
	t.Helper()
	dirs, err := filepath.Glob(filepath.Join(n.State, "shims", "*"))
	check(t, err)
	return dirs
}

// killAndAwait kills the supervisor and returns how long it took until a successor
// answered, without a call to the daemon.
func killAndAwait(t *testing.T, n *harness.Node) time.Duration {
	t.Helper()
	dir := supervisorDirs(t, n)[0]
	for _, pid := range shims(n) {
		check(t, unix.Kill(pid, unix.SIGKILL))
	}
	began := time.Now()
	eventually(t, "a successor answers", func() bool {
		c, err := client.Connect(t.Context(), dir)
		if err != nil {
			return false
		}
		defer c.Close()
		_, err = c.List(t.Context())
		return err == nil
	})
	return time.Since(began)
}
