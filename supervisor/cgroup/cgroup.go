package cgroup

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/manager"
)

// Paths are the cgroups of a container by controller, "" for version 2.
type Paths map[string]string

// tracker is the hierarchy whose cgroup stands for "all processes" of a
// container: the unified one of v2, else a v1 controller's. (On a hybrid
// machine "" is there too, but libcontainer does not put execs apart in it.)
func (p Paths) tracker() (controller, path string, ok bool) {
	for _, controller := range [...]string{"pids", "freezer", "devices", "memory", "cpu", ""} {
		if path, ok := p[controller]; ok {
			return controller, path, true
		}
	}
	return "", "", false
}

// Processes lists the processes of a container, those of its execs included.
func (p Paths) Processes() ([]int, error) {
	_, path, ok := p.tracker()
	if !ok {
		return nil, nil
	}
	return cgroups.GetAllPids(path)
}

// Frozen reports whether the container's processes do not run until they are thawed, or
// are about to stop, and with them whatever is started among them.
func (p Paths) Frozen() bool {
	says := func(path, file, text string) bool {
		state, err := os.ReadFile(filepath.Join(path, file))
		return path != "" && err == nil && strings.Contains(string(state), text)
	}
	if freezer := p["freezer"]; freezer != "" {
		return says(freezer, "freezer.state", "FR") // FREEZING, FROZEN
	}
	return says(p[""], "cgroup.freeze", "1") || says(p[""], "cgroup.events", "frozen 1") // by those above it, too
}

// limit is how long processes that were killed may take to be gone. Longer takes only
// an uninterruptible sleep.
const limit = 2 * time.Second

// repeat calls do until it is done, and reports whether it was within the limit.
func repeat(do func() (done bool)) bool {
	for deadline := time.Now().Add(limit); ; time.Sleep(500 * time.Microsecond) {
		if do() {
			return true
		}
		if time.Now().After(deadline) {
			return false
		}
	}
}

// Signal signals all processes of a container until no new ones appear; SIGKILL until
// there are none.
func (p Paths) Signal(sig syscall.Signal) error { return p.signal("", sig) }

// signal is Signal, of the child sub of the container's cgroup unless that is "".
func (p Paths) signal(sub string, sig syscall.Signal) error {
	_, path, ok := p.tracker()
	if !ok {
		return nil
	}
	path = filepath.Join(path, sub)
	if sig == syscall.SIGKILL {
		if err := os.WriteFile(filepath.Join(path, "cgroup.kill"), []byte("1"), 0); err == nil { // v2, Linux 5.14
			return nil
		}
	}
	p.thaw()
	// A process that is being forked is not in the list of its cgroup yet, but its
	// parent is, which ends after it: one look at the list, or two, can miss it.
	signalled := map[int]bool{}
	var failed error
	repeat(func() (done bool) {
		pids, err := cgroups.GetAllPids(path)
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ENODEV) { // it is removed
			failed = fmt.Errorf("signal %s: %w", path, err)
			return true
		}
		done = true
		for _, pid := range pids {
			if pid < 1 { // of another pid namespace; 0 would be our own process group
				continue
			}
			if sig == syscall.SIGKILL || !signalled[pid] {
				signalled[pid], done = true, false
				_ = syscall.Kill(pid, sig) // ESRCH: it ended meanwhile
			}
		}
		return done
	})
	return failed
}

// thaw lets processes of a frozen v1 cgroup take their signals; v2 needs none.
func (p Paths) thaw() {
	if freezer := p["freezer"]; freezer != "" {
		_ = os.WriteFile(filepath.Join(freezer, "freezer.state"), []byte("THAWED"), 0)
	}
}

// Remove ends what is left in a container's cgroups, those that are known by paths and
// those that a spec's cgroupsPath names, and removes the latter: the unit, where systemd
// has made one. It may be called again after an error.
func Remove(paths Paths, cgroupsPath string, systemd bool) error {
	config := ConfigOf(cgroupsPath, systemd)
	if config == nil {
		return nil
	}
	m, err := manager.New(config)
	if err != nil {
		return err
	}
	repeat(func() bool {
		_ = paths.Signal(syscall.SIGKILL)
		_ = Paths(m.GetPaths()).Signal(syscall.SIGKILL)
		err = m.Destroy()
		return err == nil
	})
	return err
}

// ConfigOf names the cgroups of a spec's cgroupsPath: slice:prefix:name for systemd. It is
// nil for a container without cgroups of its own: no path may ever lead to those of others.
func ConfigOf(cgroupsPath string, systemd bool) *cgroups.Cgroup {
	config := &cgroups.Cgroup{Systemd: systemd, Resources: &cgroups.Resources{}}
	switch parts := strings.Split(cgroupsPath, ":"); {
	case systemd && len(parts) == 3 && parts[2] != "":
		config.Parent, config.ScopePrefix, config.Name = parts[0], parts[1], parts[2]
	case !systemd && filepath.Clean("/"+cgroupsPath) != "/":
		config.Path = filepath.Clean("/" + cgroupsPath)
	default:
		return nil
	}
	return config
}

// removeOne removes a cgroup. One with processes is left,
// unless they were killed: then they are waited for.
func removeOne(path string, killed bool) {
	repeat(func() bool {
		err := os.Remove(path)
		return err == nil || errors.Is(err, os.ErrNotExist) || !killed && hasProcesses(path)
	})
}

func hasProcesses(path string) bool {
	content, err := os.ReadFile(filepath.Join(path, "cgroup.procs"))
	return err == nil && len(content) > 0
}
