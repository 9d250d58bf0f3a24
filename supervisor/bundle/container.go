// Package bundle is what the supervisor and its starters have to know of a container, or a pause, to work on it: the
// OCI bundle that the daemon has written, the directory of its states, and its cgroups. It owns nothing and has no lock:
// who calls it owns the container, its supervisor or the starter that works for that.
package bundle

import (
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"syscall"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/manager"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/internal/process"
)

// Container is what an operation on a container has to know of it.
type Container struct {
	ID            string   `json:"id"`
	Bundle        string   `json:"bundle"`            // directory of config.json
	Root          string   `json:"root"`              // of the engine's states
	Runtime       []string `json:"program,omitempty"` // an OCI runtime's program and its global flags; none for libcontainer
	SystemdCgroup bool     `json:"systemd_cgroup,omitempty"`
	CgroupsPath   string   `json:"cgroups_path"`      // the spec's linux.cgroupsPath: slice:prefix:name with SystemdCgroup
	Cgroups       Cgroups  `json:"cgroups,omitempty"` // once it is created
}

// Dir has the container's state.
func (c Container) Dir() string { return filepath.Join(c.Root, c.ID) }

// RuntimeStates is the directory of a runtime's own states, below Root.
const RuntimeStates = "states"

// Remove ends what runs in the container's cgroups, and removes the cgroups, the container's directory, and what a
// runtime keeps of it: all files that begin with the id, because a killed create leaves a state that the runtime does
// not recognize, and runsc leaves locks. The runtime's directories go with its last container. Remove can be repeated.
func (c Container) Remove() error {
	if err := c.removeCgroups(); err != nil {
		return fmt.Errorf("remove the cgroups %s: %w", c.CgroupsPath, err)
	}
	states := filepath.Join(c.Root, RuntimeStates)
	left, err := filepath.Glob(filepath.Join(states, c.ID+"*"))
	for _, path := range append(left, c.Dir()) {
		err = errors.Join(err, os.RemoveAll(path))
	}
	if err != nil || len(c.Runtime) == 0 {
		return err
	}
	// Another container that goes at the same moment may have removed states, and left the rest for this one.
	if err := os.Remove(states); err == nil || errors.Is(err, os.ErrNotExist) {
		_ = os.Remove(c.Root) // unless it has other containers
	}
	return nil
}

// RemoveEmptied removes the cgroups of a container that has ended, as runtimes do: agents would go on to measure it.
// systemd removes empty scopes by itself. Remove repeats a failure.
func (c Container) RemoveEmptied() {
	if config := c.CgroupConfig(); config != nil && !config.Systemd {
		_ = c.removeCgroups()
	}
}

// removeCgroups ends what is left in the container's cgroups, those that are known and
// those that the spec names, and removes the latter: the unit, where systemd has made one.
func (c Container) removeCgroups() error {
	config := c.CgroupConfig()
	if config == nil {
		return nil
	}
	m, err := manager.New(config)
	if err != nil {
		return err
	}
	process.AwaitKilled(func() bool {
		_ = c.Cgroups.Signal("", syscall.SIGKILL)
		_ = Cgroups(m.GetPaths()).Signal("", syscall.SIGKILL)
		err = m.Destroy()
		return err == nil
	})
	return err
}

// CgroupConfig names the cgroups of the spec. It is nil for a container without cgroups of
// its own: no path may ever lead to those of others.
func (c Container) CgroupConfig() *cgroups.Cgroup {
	config := &cgroups.Cgroup{Systemd: c.SystemdCgroup, Resources: &cgroups.Resources{}}
	switch parts := strings.Split(c.CgroupsPath, ":"); {
	case c.SystemdCgroup && len(parts) == 3 && parts[2] != "":
		config.Parent, config.ScopePrefix, config.Name = parts[0], parts[1], parts[2]
	case !c.SystemdCgroup && filepath.Clean("/"+c.CgroupsPath) != "/":
		config.Path = filepath.Clean("/" + c.CgroupsPath)
	default:
		return nil
	}
	return config
}

// ReadSpec reads the OCI runtime specification of a bundle. Its root is
// made absolute: nothing here depends on the working directory.
func ReadSpec(bundle string) (*specs.Spec, error) {
	path := filepath.Join(bundle, "config.json")
	spec := new(specs.Spec)
	if err := ReadJSON(path, spec); err != nil {
		return nil, fmt.Errorf("read the bundle: %w", err)
	}
	if spec.Root == nil || spec.Process == nil || spec.Linux == nil {
		return nil, fmt.Errorf("parse %s: root, process and linux are needed", path)
	}
	if !filepath.IsAbs(spec.Root.Path) {
		spec.Root.Path = filepath.Join(bundle, spec.Root.Path)
	}
	return spec, nil
}

// WriteJSON replaces a file as a whole: a reader sees the old or the new.
func WriteJSON(path string, value any) error {
	content, err := json.Marshal(value)
	if err != nil {
		return err
	}
	temporary := path + ".new"
	err = os.WriteFile(temporary, content, 0o600)
	if err == nil {
		err = os.Rename(temporary, path)
	}
	if err != nil {
		return errors.Join(err, os.RemoveAll(temporary)) // a disk that is full holds half of it
	}
	return nil
}

// ReadJSON decodes a file.
func ReadJSON(path string, value any) error {
	content, err := os.ReadFile(path)
	if err != nil {
		return err
	}
	if err := json.Unmarshal(content, value); err != nil {
		return fmt.Errorf("parse %s: %w", path, err)
	}
	return nil
}

// Cgroups are the cgroups of a container by controller, "" for version 2.
type Cgroups map[string]string

// Tracker is the hierarchy whose cgroup stands for "all processes" of a container: the unified one of v2, else a v1
// controller's. (On a hybrid machine "" is there too, but libcontainer does not put execs apart in it.)
func (g Cgroups) Tracker() (controller, path string, ok bool) {
	for _, controller := range [...]string{"pids", "freezer", "devices", "memory", "cpu", ""} {
		if path, ok := g[controller]; ok {
			return controller, path, true
		}
	}
	return "", "", false
}

// Processes lists the processes of a container, those of its execs included.
func (g Cgroups) Processes() ([]int, error) {
	_, path, ok := g.Tracker()
	if !ok {
		return nil, nil
	}
	return cgroups.GetAllPids(path)
}

// Frozen reports whether the container's processes do not run until they are thawed, or
// are about to stop, and with them whatever is started among them.
func (g Cgroups) Frozen() bool {
	says := func(path, file, text string) bool {
		state, err := os.ReadFile(filepath.Join(path, file))
		return path != "" && err == nil && strings.Contains(string(state), text)
	}
	if freezer := g["freezer"]; freezer != "" {
		return says(freezer, "freezer.state", "FR") // FREEZING, FROZEN
	}
	return says(g[""], "cgroup.freeze", "1") || says(g[""], "cgroup.events", "frozen 1") // by those above it, too
}

// Signal signals all processes in the child sub of the container's cgroup, "" for the
// cgroup itself, until no new ones appear; SIGKILL until there are none.
func (g Cgroups) Signal(sub string, sig syscall.Signal) error {
	_, path, ok := g.Tracker()
	if !ok {
		return nil
	}
	path = filepath.Join(path, sub)
	if sig == syscall.SIGKILL {
		if err := os.WriteFile(filepath.Join(path, "cgroup.kill"), []byte("1"), 0); err == nil { // v2, Linux 5.14
			return nil
		}
	}
	// A process that is being forked is not in the list of its cgroup yet, but its parent is, which ends after it: one
	// look at the list, or two, can miss it.
	signalled := map[int]bool{}
	list := func() ([]int, error) { return cgroups.GetAllPids(path) }
	var failed error
	process.AwaitKilled(func() (done bool) {
		pids, err := list()
		pids = slices.DeleteFunc(pids, func(pid int) bool { return pid < 1 || sig != syscall.SIGKILL && signalled[pid] })
		if err == nil && len(pids) > 0 {
			g.thaw(pids)
			var sent []int
			sent, err = process.SignalListed(pids, list, sig)
			for _, pid := range sent {
				signalled[pid] = true
			}
		}
		if err != nil && !errors.Is(err, os.ErrNotExist) && !errors.Is(err, syscall.ENODEV) { // it is removed
			failed = fmt.Errorf("signal %s: %w", path, err)
			return true
		}
		return len(pids) == 0
	})
	return failed
}

// thaw thaws the processes that the container's freezer of version 1, or a cgroup below it, has frozen: a runtime in the
// container may freeze some, and a frozen process does not end. Processes that version 2 has frozen do.
func (g Cgroups) thaw(pids []int) {
	top := g["freezer"]
	if top == "" {
		return
	}
	_ = filepath.WalkDir(top, func(dir string, entry fs.DirEntry, err error) error {
		if err != nil || !entry.IsDir() {
			return nil // it may be removed meanwhile
		}
		inside, _ := cgroups.GetPids(dir)
		if slices.ContainsFunc(inside, func(pid int) bool { return slices.Contains(pids, pid) }) {
			for ; len(dir) >= len(top); dir = filepath.Dir(dir) { // a cgroup above may have frozen it
				_ = os.WriteFile(filepath.Join(dir, "freezer.state"), []byte("THAWED"), 0)
			}
		}
		return nil
	})
}
