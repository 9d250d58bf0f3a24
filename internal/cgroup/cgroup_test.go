package cgroup

import (
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/minicri/minicri/test/harness"
)

// within is far more than the end of a killed process takes.
const within = time.Minute

// own is in the names of this run: another run on the machine may have our pid, in a pid namespace of its own.
var own = fmt.Sprintf("%d-%d", os.Getpid(), time.Now().UnixNano())

// parent is the cgroup that everything here is made below.
var parent = "/minicri-unit-" + own

func TestRemoveKillsWhatRunsInAnyHierarchy(t *testing.T) {
	hierarchies := find(t)
	path := parent + "/pod"
	for i, hierarchy := range hierarchies {
		inner := filepath.Join(path, "container")
		makeCgroup(t, hierarchy, inner)
		// One process in each hierarchy that takes one, in turn above and below.
		where := path
		if i%2 == 1 {
			where = inner
		}
		pid := startIn(t, hierarchy, where)
		if pids, err := hierarchies.Processes(path); pid != 0 && (err != nil || !slices.Contains(pids, pid)) {
			t.Errorf("process %d in %s of %s is not among %v (%v)", pid, where, hierarchy, pids, err)
		}
	}
	pids, err := hierarchies.Processes(path)
	harness.Want(t, err == nil && len(pids) > 0, "Processes = %v, %v", pids, err)
	harness.Check(t, hierarchies.Remove(path, within))
	harness.Want(t, !hierarchies.Exists(path), "the cgroup is still there")
	for _, pid := range pids {
		harness.Eventually(t, fmt.Sprintf("process %d ends", pid), func() bool {
			_, err := os.Stat(fmt.Sprintf("/proc/%d", pid))
			return errors.Is(err, os.ErrNotExist)
		})
	}
	harness.Want(t, hierarchies.Exists(parent), "the parent is gone, too")
}

func TestRemoveRefusesTheRoot(t *testing.T) {
	// None of these is a hierarchy: a mistake here must not cost the machine.
	hierarchies := Hierarchies{t.TempDir()}
	inside := filepath.Join(hierarchies[0], "inside")
	harness.Check(t, os.Mkdir(inside, 0o700))
	for _, path := range []string{"", "/", "//", ".", "..", "/..", "/a/..", "a/../..", "/a/../../"} {
		harness.WantError(t, hierarchies.Remove(path, within), "root")
	}
	_, err := os.Stat(inside)
	harness.Check(t, err)
}

// A path does not lead out of the hierarchies.
func TestRemoveStaysInside(t *testing.T) {
	dir := t.TempDir()
	outside := filepath.Join(dir, "outside")
	harness.Check(t, errors.Join(os.Mkdir(outside, 0o700), os.Mkdir(filepath.Join(dir, "hierarchy"), 0o700)))
	harness.Check(t, (Hierarchies{filepath.Join(dir, "hierarchy")}).Remove("../outside", within))
	_, err := os.Stat(outside)
	harness.Want(t, err == nil, "a directory beside the hierarchy is gone: %v", err)
}

func TestRemoveOfABusyCgroup(t *testing.T) {
	hierarchies := find(t)
	path := parent + "/busy"
	for _, hierarchy := range hierarchies {
		makeCgroup(t, hierarchy, path)
		startIn(t, hierarchy, path)
	}
	// No process goes within a time that is over.
	err := hierarchies.Remove(path, -time.Second)
	harness.Want(t, errors.Is(err, ErrBusy), "Remove = %v, want ErrBusy", err)
	harness.Check(t, hierarchies.Remove(path, within))
}

func TestFind(t *testing.T) {
	hierarchies := find(t)
	mark := "unit-" + own + "-"
	want := []string{parent + "/" + mark + "a", parent + "/deep/er/" + mark + "b"}
	for i, path := range want {
		// Each in one hierarchy alone: what is left of a pod may be so.
		makeCgroup(t, hierarchies[i%len(hierarchies)], path)
	}
	makeCgroup(t, hierarchies[0], want[0]+"/"+mark+"inner") // is found with the outer one
	makeCgroup(t, hierarchies[0], parent+"/other-"+mark)
	// What a node makes that runs in a container of this one is that node's.
	makeCgroup(t, hierarchies[0], parent+"/minicri-c-01234567-ab/kubepods/"+mark+"nested")
	makeCgroup(t, hierarchies[0], parent+"/"+strings.Repeat("0123456789abcdef", 4)+"/kubepods/"+mark+"nested")
	ours := func(name string) bool { return strings.HasPrefix(name, mark) }
	got, err := hierarchies.Find(ours, []string{parent})
	slices.Sort(want)
	slices.Sort(got)
	harness.Want(t, err == nil && slices.Equal(got, want), "Find = %q, %v, want %q", got, err, want)
	for _, elsewhere := range []string{"/", parent + "-other"} {
		got, err := hierarchies.Find(ours, []string{elsewhere})
		harness.Want(t, err == nil && len(got) == 0, "Find below %s = %q, %v", elsewhere, got, err)
	}
}

// find finds the hierarchies, and takes everything below parent back when the test ends.
func find(t *testing.T) Hierarchies {
	hierarchies, err := FindHierarchies()
	harness.Check(t, err)
	t.Cleanup(func() {
		harness.Check(t, hierarchies.Remove(parent, within))
		harness.Want(t, !hierarchies.Exists(parent), "%s is left behind", parent)
	})
	return hierarchies
}

func makeCgroup(t *testing.T, hierarchy, path string) {
	harness.Check(t, os.MkdirAll(filepath.Join(hierarchy, path), 0o755))
}

// startIn starts a process in a cgroup of one hierarchy; 0 where the hierarchy
// takes none: cpuset does not before it is told which processors.
func startIn(t *testing.T, hierarchy, path string) int {
	command := exec.Command("sleep", "60")
	harness.Check(t, command.Start())
	// Reaped at once, as the daemon does.
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		_ = command.Wait()
	}()
	t.Cleanup(func() {
		_ = command.Process.Kill()
		<-ended
	})
	pid := command.Process.Pid
	err := os.WriteFile(filepath.Join(hierarchy, path, "cgroup.procs"), []byte(strconv.Itoa(pid)), 0)
	if err != nil && strings.Contains(hierarchy, "cpuset") {
		return 0
	}
	harness.Want(t, err == nil, "put process %d into %s of %s: %v", pid, path, hierarchy, err)
	return pid
}
