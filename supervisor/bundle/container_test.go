package bundle

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// A version 2 cgroup lists processes of another pid namespace as 0
// (pid_namespaces(7)): a signal to that would be one to our own process group.
func TestSignalsToACgroupNeverReachOurselves(t *testing.T) {
	if path := os.Getenv("MINICRI_TEST_CGROUP"); path != "" { // in a pid namespace of its own
		content, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
		harness.Want(t, err == nil && string(content) == "0\n", "the kernel lists %q, %v", content, err)
		harness.Check(t, (Cgroups{"": path}).Signal("", syscall.SIGTERM))
		return // alive: a signal to one's own group comes before kill(2) returns
	}
	root := "/sys/fs/cgroup/unified" // of a hybrid machine
	if _, err := os.Stat(filepath.Join(root, "cgroup.procs")); err != nil {
		root = "/sys/fs/cgroup"
	}
	path := filepath.Join(root, fmt.Sprintf("minicri-unit-cgroup-%d", time.Now().UnixNano()))
	harness.Check(t, os.Mkdir(path, 0o755))
	sleeper := exec.Command("sleep", "1000")
	harness.Check(t, sleeper.Start())
	defer func() {
		_, _ = sleeper.Process.Kill(), sleeper.Wait()
		harness.Check(t, os.Remove(path))
	}()
	harness.Check(t, os.WriteFile(path+"/cgroup.procs", fmt.Append(nil, sleeper.Process.Pid), 0))
	inside := exec.Command(os.Args[0], "-test.run=^"+t.Name()+"$")
	inside.Env = append(os.Environ(), "MINICRI_TEST_CGROUP="+path)
	inside.SysProcAttr = &syscall.SysProcAttr{Cloneflags: syscall.CLONE_NEWPID, Setpgid: true}
	said, err := inside.CombinedOutput()
	harness.Want(t, err == nil, "%v\n%s", err, said)
}

// A runtime inside of a container may freeze cgroups below the container's. SIGKILL ends what is in them all the same, and
// that to an exec's cgroup ends the exec alone.
//
// attack: denial of service: a container with access to its cgroup v1 freezes cgroups below it, at several depths
// held: the container can be stopped and removed; the end of an exec thaws no other process
func TestKillThawsWhatIsFrozen(t *testing.T) {
	frozen := "1"
	name := fmt.Sprintf("minicri-unit-frozen-%d", time.Now().UnixNano())
	tracker, freezer, file := "/sys/fs/cgroup/"+name, "/sys/fs/cgroup/"+name, "cgroup.freeze"
	g := Cgroups{"": tracker}
	if _, err := os.Stat("/sys/fs/cgroup/freezer"); err == nil { // version 1
		tracker, freezer, file, frozen = "/sys/fs/cgroup/pids/"+name, "/sys/fs/cgroup/freezer/"+name, "freezer.state", "FROZEN"
		g = Cgroups{"pids": tracker, "freezer": freezer}
	}
	var sleepers []*exec.Cmd
	sleeper := func(dirs ...string) {
		command := exec.Command("sleep", "1000")
		harness.Check(t, command.Start())
		sleepers = append(sleepers, command)
		for _, dir := range dirs {
			harness.Check(t, errors.Join(os.MkdirAll(dir, 0o755), os.WriteFile(dir+"/cgroup.procs", fmt.Append(nil, command.Process.Pid), 0)))
		}
	}
	freeze := func(below string) {
		harness.Check(t, os.WriteFile(filepath.Join(freezer, below, file), []byte(frozen), 0))
	}
	defer func() {
		for _, dir := range []string{"/a/b/c", "/a/b", "/a", "/sub/x", "/sub", "/d", ""} {
			_ = errors.Join(os.Remove(tracker+dir), os.Remove(freezer+dir))
		}
		_, err := os.Stat(freezer)
		harness.Want(t, errors.Is(err, os.ErrNotExist), "cgroups are left behind: %v", err)
	}()
	harness.Check(t, errors.Join(os.MkdirAll(tracker, 0o755), os.MkdirAll(freezer, 0o755)))
	for _, below := range []string{"/d", "/a/b", "/a/b/c", "/d"} {
		sleeper(tracker+below, freezer+below)
	}
	sleeper(tracker+"/sub", freezer+"/sub/x") // of an exec
	for _, below := range []string{"d", "a/b/c", "a", "sub"} {
		freeze(below)
	}
	harness.Check(t, g.Signal("sub", syscall.SIGKILL))
	_ = sleepers[4].Wait()
	state, err := os.ReadFile(filepath.Join(freezer, "d", file))
	harness.Want(t, err == nil && strings.TrimSpace(string(state)) != "THAWED", "the end of an exec thaws others: %q, %v", state, err)
	harness.Check(t, g.Signal("", syscall.SIGKILL))
	for _, command := range sleepers[:4] {
		_ = command.Wait()
	}
}

// Containers of a program that are removed at the same moment leave none of its
// directories: whichever is the last removes them.
func TestRemoveOfContainersAtOnce(t *testing.T) {
	for range 200 {
		root := filepath.Join(t.TempDir(), "runc")
		var removals sync.WaitGroup
		ids := []string{"one", "two", "three"}
		for _, id := range ids {
			harness.Check(t, errors.Join(os.MkdirAll(filepath.Join(root, id), 0o700), os.MkdirAll(filepath.Join(root, RuntimeStates, id), 0o700)))
		}
		for _, id := range ids {
			removals.Go(func() { harness.Same(t, id, (Container{ID: id, Root: root, Runtime: []string{"runc"}}).Remove(), nil) })
		}
		removals.Wait()
		_, err := os.Stat(root)
		harness.Want(t, errors.Is(err, os.ErrNotExist), "the program's directory is left: %v", err)
	}
}
