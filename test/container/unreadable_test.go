package container

import (
	"errors"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"testing"

	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// A container of which nothing can be read that supervisors keep runs on, and is not
// said to have ended: it is unknown what it does, and it can be stopped and removed.
func TestContainerThatNoSupervisorKnows(t *testing.T) {
	p := newPod(t)
	stopped, known := p.run("stopped", forever), p.run("known", forever)
	pid := p.info(stopped).PID
	dir := supervisorDirs(t, p.Node)[0]
	p.Kill()
	p.killShim()
	check(t, os.Truncate(filepath.Join(dir, "records", stopped+".json"), 1))
	p.Start()
	eventually(t, "the other one is adopted", func() bool { return p.status(known).State == running })
	if state := p.status(stopped).State; state != runtimeapi.ContainerState_CONTAINER_UNKNOWN || unix.Kill(pid, 0) != nil {
		t.Errorf("it is %v, and its process: %v", state, unix.Kill(pid, 0))
	}
	check(t, p.stop(stopped, 1))
	same(t, "state when it is stopped", p.status(stopped).State.String(), exited.String())
	eventually(t, "its process is gone", func() bool { return errors.Is(unix.Kill(pid, 0), unix.ESRCH) })
	check(t, p.remove(stopped))
	same(t, "exec in the other one", p.exec(known, "echo hi"), "hi")
}

// A container whose record or facts cannot be read runs on, and is what it was when
// the file is back; one whose facts are gone is what its supervisor knows of it.
func TestWhatIsNoFileCostsNoContainer(t *testing.T) {
	p := newPod(t)
	files, ids, pids := map[string]string{}, map[string]string{}, map[string]int{}
	for name, dir := range map[string]string{"record": "containers", "facts": "container-facts", "gone": "container-facts", "null": "container-facts"} {
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
	for name, pid := range pids {
		if err := unix.Kill(pid, 0); err != nil {
			t.Errorf("%s: it was ended: %v", name, err)
		}
	}
	for _, name := range []string{"facts", "gone", "null"} {
		eventually(t, name+" is listed", func() bool { return p.status(ids[name]).State == running })
		same(t, name, strconv.Itoa(p.info(ids[name]).PID), strconv.Itoa(pids[name]))
		same(t, "exec in "+name, p.exec(ids[name], "echo hi"), "hi")
	}
	if output, err := p.RunCommand("check"); err == nil || !strings.Contains(output, files["record"]) || !strings.Contains(output, "quarantine") {
		t.Errorf("check says nothing of them: %v\n%s", err, output)
	}
	p.Kill()
	for _, name := range []string{"record", "facts"} {
		check(t, os.RemoveAll(files[name]))
		check(t, os.Rename(files[name]+".aside", files[name]))
	}
	p.Start()
	for name, id := range ids {
		eventually(t, name+" is listed again", func() bool { return p.status(id).State == running })
		same(t, name, strconv.Itoa(p.info(id).PID), strconv.Itoa(pids[name]))
	}
	_, err := p.RunCommand("check", "--fix", "--force") // what is in quarantine
	check(t, err)
}
