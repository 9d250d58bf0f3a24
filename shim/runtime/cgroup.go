package runtime

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/opencontainers/cgroups"
)

// tracker is the hierarchy whose cgroup stands for "all processes" of a
// container: the unified one of v2, else a v1 controller's. (On a hybrid
// machine "" is there too, but libcontainer does not put execs apart in it.)
func tracker(paths map[string]string) (controller, path string, ok bool) {
	for _, controller := range [...]string{"pids", "freezer", "devices", "memory", "cpu", ""} {
		if path, ok := paths[controller]; ok {
			return controller, path, true
		}
	}
	return "", "", false
}

// SignalCgroups signals all processes of a container that cannot be loaded, by its
// cgroups.
func SignalCgroups(paths map[string]string, sig syscall.Signal) error {
	return killCgroup(paths, "", sig)
}

// RemoveCgroups ends what is left in the cgroups of a container that cannot be
// loaded, and removes them.
func RemoveCgroups(paths map[string]string) error {
	err := killCgroup(paths, "", syscall.SIGKILL)
	for _, path := range paths {
		err = errors.Join(err, cgroups.RemovePath(path))
	}
	return err
}

// killCgroup signals all processes of a container's cgroup, or of its child
// sub, until no new ones appear; SIGKILL until there are none.
func killCgroup(paths map[string]string, sub string, sig syscall.Signal) error {
	_, path, ok := tracker(paths)
	if !ok {
		return nil
	}
	path = filepath.Join(path, sub)
	if sig == syscall.SIGKILL {
		if err := os.WriteFile(filepath.Join(path, "cgroup.kill"), []byte("1"), 0); err == nil { // v2, Linux 5.14
			return nil
		}
	}
	thaw(paths)
	signalled := map[int]bool{}
	for deadline := time.Now().Add(emptyTimeout); ; time.Sleep(emptyInterval) {
		pids, err := cgroups.GetAllPids(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ENODEV) { // it is removed: Clear
			return fmt.Errorf("signal %s: %w", path, err)
		}
		again := false
		for _, pid := range pids {
			if pid < 1 { // of another pid namespace; 0 would be our own process group
				continue
			}
			if sig == syscall.SIGKILL || !signalled[pid] {
				signalled[pid], again = true, true
				_ = syscall.Kill(pid, sig) // ESRCH: it ended meanwhile
			}
		}
		if !again || time.Now().After(deadline) { // in an uninterruptible sleep it ends when it can
			return nil
		}
	}
}

// A process that is being forked is not in the list of its cgroup yet, but its
// parent is, which ends after it: one look at the list, or two, can miss it.
const (
	emptyTimeout  = time.Second
	emptyInterval = 500 * time.Microsecond
)

// thaw lets processes of a frozen v1 cgroup take their signals; v2 needs none.
func thaw(paths map[string]string) {
	if freezer := paths["freezer"]; freezer != "" {
		_ = os.WriteFile(filepath.Join(freezer, "freezer.state"), []byte("THAWED"), 0)
	}
}

// removeCgroup removes a cgroup and reports whether it is gone. One with
// processes is left, unless they were killed: then they are waited for.
func removeCgroup(path string, killed bool) bool {
	for deadline := time.Now().Add(deleteTimeout); ; time.Sleep(time.Millisecond) {
		if err := os.Remove(path); err == nil || errors.Is(err, os.ErrNotExist) {
			return true
		}
		if !killed && hasProcesses(path) || time.Now().After(deadline) {
			return false
		}
	}
}

func hasProcesses(path string) bool {
	content, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
	return err == nil && len(content) > 0
}
