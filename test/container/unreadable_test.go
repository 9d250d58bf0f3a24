package container

import (
	"os"
	"path/filepath"
	"syscall"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A container of which nothing can be read that supervisors keep runs on, and is not
// said to have ended: what it does is unknown until it ends, and it can be stopped and
// removed.
func TestContainerThatNoSupervisorKnows(t *testing.T) {
	p := newPod(t)
	stopped, ends, known := p.run("stopped", forever), p.run("ends", forever), p.run("known", forever)
	pids := map[string]int{stopped: p.info(stopped).PID, ends: p.info(ends).PID}
	dir := supervisorDirs(t, p.Node)[0]
	p.Kill()
	p.killShim()
	for id := range pids {
		for _, file := range []string{"records/" + id + ".json", "records/" + id + ".copy", "containers/" + id + "/state.json"} {
			check(t, os.WriteFile(filepath.Join(dir, file), []byte("{"), 0o600))
		}
	}
	p.Start()
	eventually(t, "the other one is adopted", func() bool { return p.status(known).State == running })
	for id, pid := range pids {
		if state := p.status(id).State; state != runtimeapi.ContainerState_CONTAINER_UNKNOWN || unix.Kill(pid, 0) != nil {
			t.Errorf("it is %v, and its process: %v", state, unix.Kill(pid, 0))
		}
	}
	check(t, unix.Kill(pids[ends], syscall.SIGKILL))
	eventually(t, "its end is seen", func() bool { return p.status(ends).State == exited })
	check(t, p.stop(stopped, 1))
	if state := p.status(stopped).State; state != exited || unix.Kill(pids[stopped], 0) == nil {
		t.Errorf("stopped: it is %v, and its process: %v", state, unix.Kill(pids[stopped], 0))
	}
	for id := range pids {
		check(t, p.remove(id))
	}
	same(t, "exec in the other one", p.exec(known, "echo hi"), "hi")
}
