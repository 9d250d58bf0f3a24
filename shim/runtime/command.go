package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
)

// Command is a runtime with runc's command line, such as runc, crun and youki:
// https://github.com/opencontainers/runtime-tools/blob/master/docs/command-line-interface.md
// and the flags that runc has beyond it. Each verb is a run of the program.
// Init and the processes of execs are left to this process as their
// sub-reaper when the run of the program ends.
type Command struct {
	program       []string // path and global flags
	root          string   // of the runtime's states
	bundles       string   // a directory for each container: config.json, cgroups.json
	systemdCgroup bool
	children      *children
	execCgroups   func() execCgroupForm
	dirs          sync.Mutex // held while the directories above are made or removed
	runs          runs
}

// NewCommand runs a program, a path and global flags. The states of its
// containers are kept below root. From now on this process is a sub-reaper, and
// Builtin reaps what has no owner.
func NewCommand(program []string, root string, systemdCgroup bool, builtin *Builtin) *Command {
	builtin.children.adopt()
	return &Command{
		program: program, root: filepath.Join(root, "states"), bundles: filepath.Join(root, "bundles"),
		systemdCgroup: systemdCgroup, children: builtin.children,
		execCgroups: sync.OnceValue(func() execCgroupForm { return askExecCgroups(program[0], builtin.children) }),
	}
}

// Features is of Runtime.
func (r *Command) Features() Features {
	return Features{Adoption: true, ExecTrees: r.execCgroups() != noExecCgroups}
}

// Create is of Runtime.
func (r *Command) Create(id, _ string, spec *specs.Spec, streams Streams) (Container, *Process, error) {
	if err := clampOOMScoreAdj(spec.Process); err != nil {
		return nil, nil, err
	}
	c := &commandContainer{runtime: r, id: id, bundle: filepath.Join(r.bundles, id)}
	process, passed, err := withBytes(spec.Process, spec.Linux.MountLabel)
	if err != nil {
		return nil, nil, err
	}
	defer passed.Close()
	if err := c.writeBundle(spec, process); err != nil {
		return nil, nil, errors.Join(fmt.Errorf("write the bundle of container %s: %w", id, err), os.RemoveAll(c.bundle))
	}
	init, err := c.launch(streams, passed, "create", "--bundle", c.bundle)
	if err == nil {
		err = c.findCgroups(init.PID, spec.Linux.CgroupsPath)
	}
	if err != nil {
		if init != nil {
			c.runtime.children.disown(init.PID)
			err = errors.Join(err, init.Close())
		}
		return nil, nil, errors.Join(err, c.Delete())
	}
	return c, init, nil
}

// Abort is of Runtime: every run of the program for the container is ended, with
// what it has started.
func (r *Command) Abort(id string) error {
	r.runs.end(id)
	return nil
}

// Load is of Runtime.
func (r *Command) Load(id string) (Container, error) {
	c := &commandContainer{runtime: r, id: id, bundle: filepath.Join(r.bundles, id)}
	content, err := os.ReadFile(c.cgroupsFile())
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("load container %s: %w: %w", id, errdefs.ErrNotFound, err)
	}
	if err == nil {
		err = json.Unmarshal(content, &c.cgroups)
	}
	if err != nil {
		return nil, fmt.Errorf("load container %s: %w", id, err)
	}
	c.execs = newExecCgroups(c.cgroups, c.bundle)
	return c, nil
}

// Discard is of Runtime.
func (r *Command) Discard(id string) error {
	return (&commandContainer{runtime: r, id: id, bundle: filepath.Join(r.bundles, id)}).Delete()
}

// commandContainer is a container of a Command.
type commandContainer struct {
	runtime *Command
	id      string
	bundle  string
	cgroups map[string]string // by controller, "" for version 2
	execs   *execCgroups
}

func (c *commandContainer) cgroupsFile() string { return filepath.Join(c.bundle, "cgroups.json") }

func (c *commandContainer) writeBundle(spec *specs.Spec, process *specs.Process) error {
	c.runtime.dirs.Lock()
	err := errors.Join(os.MkdirAll(c.runtime.root, 0o711), os.MkdirAll(c.bundle, 0o700))
	c.runtime.dirs.Unlock()
	if err != nil {
		return err
	}
	old := *spec
	old.Version, old.Process, old.Hooks = oldestVersion, process, limitedHooks(spec.Hooks, c.id)
	return writeJSON(filepath.Join(c.bundle, "config.json"), &old)
}

// MountLabel is of Container.
func (c *commandContainer) MountLabel() string {
	spec, err := ReadSpec(c.bundle)
	if err != nil {
		return ""
	}
	return spec.Linux.MountLabel
}

// oldestVersion is the version of the runtime-spec that bundles name. Runtimes
// refuse versions that are newer than they are (crun before 1.9 any but 1.0.x)
// and read what they know of fields that came later all the same.
const oldestVersion = "1.0.2"

func writeJSON(path string, value any) error {
	encoded, err := json.Marshal(value)
	if err != nil {
		return err
	}
	return os.WriteFile(path, encoded, 0o600)
}

// findCgroups remembers init's cgroups: those that were made for the container. A
// process that is in none of them is another one.
func (c *commandContainer) findCgroups(pid int, cgroupsPath string) error {
	found, err := cgroupsOf(pid)
	if err != nil {
		return fmt.Errorf("cgroups of container %s: %w", c.id, err)
	}
	if c.cgroups = ofContainer(found, cgroupsPath); len(c.cgroups) == 0 {
		return fmt.Errorf("%s has put process %d of container %s into %v, not into %q", c.runtime.program[0], pid, c.id, found, cgroupsPath)
	}
	c.execs = newExecCgroups(c.cgroups, c.bundle)
	return writeJSON(c.cgroupsFile(), c.cgroups)
}

// launch runs a verb that starts a process of the container: create or exec.
// The process gets what is passed after its standard streams.
func (c *commandContainer) launch(streams Streams, passed files, verb string, arguments ...string) (*Process, error) {
	scratch, err := os.MkdirTemp(c.bundle, verb+"-")
	if err != nil {
		return nil, err
	}
	defer os.RemoveAll(scratch)
	pidFile := filepath.Join(scratch, "pid")
	arguments = append([]string{verb, "--pid-file", pidFile}, arguments...)
	console, err := c.console(streams, scratch)
	if err != nil {
		return nil, err
	}
	given := slices.Clone(passed)
	if len(passed) > 0 {
		arguments = append(arguments, "--preserve-fds", strconv.Itoa(len(passed)))
	}
	if console != nil {
		defer console.close()
		given = append(given, console.directory)
		arguments = append(arguments, "--console-socket", console.path(len(passed)))
	}
	moving, moved := context.WithCancel(context.Background())
	defer moved()
	go cgroup.KeepLockWarm(moving)
	pid, err := c.runtime.children.own(func() (int, error) {
		if err := c.run(nil, streams, given, append(arguments, c.id)...); err != nil {
			return 0, err
		}
		pid, err := readPID(pidFile)
		if err == nil {
			err = c.runtime.children.checkNew(pid)
		}
		if err != nil {
			err = fmt.Errorf("%s %s of container %s has ended without an error, but has made no process: %w", c.runtime.program[0], verb, c.id, err)
		}
		return pid, err
	})
	if err != nil {
		return nil, err
	}
	p, err := openProcess(pid)
	if err == nil && console != nil {
		p.Terminal, err = console.receive()
	}
	if err != nil {
		c.runtime.children.disown(pid)
		return nil, err
	}
	p.reap = func() (syscall.WaitStatus, bool) { return c.runtime.children.wait(pid) }
	return p, nil
}

// Started is of Container: the runtime has run the hooks itself.
func (c *commandContainer) Started() error { return nil }

// StartHooks is of StartHooked.
func (c *commandContainer) StartHooks() (names string, limit time.Duration) {
	return startHooks(c.bundle)
}

// Start is of Container.
func (c *commandContainer) Start() error {
	return c.runtime.children.during(func() error { return c.run(nil, Streams{}, nil, "start", c.id) })
}

// SignalAll is of Container.
func (c *commandContainer) SignalAll(sig syscall.Signal) error { return killCgroup(c.cgroups, "", sig) }

// EndExecs is of Container.
func (c *commandContainer) EndExecs() error { return c.execs.endAll() }

// Cgroups is of Container.
func (c *commandContainer) Cgroups() map[string]string { return c.cgroups }

// Update is of Container. A runtime that refuses a part may have set the rest,
// so what the files held is put back.
func (c *commandContainer) Update(wanted *specs.LinuxResources, oomScoreAdj *int) error {
	encoded, err := json.Marshal(wanted)
	if err != nil {
		return err
	}
	undo := func() error { return nil }
	if oomScoreAdj != nil {
		if undo, err = setOOMScoreAdj(c.cgroups, *oomScoreAdj); err != nil {
			return err
		}
	}
	before := readLimits(c.cgroups, wanted.Unified)
	if err = tryLimits(c.cgroups, alone(wanted)); err == nil {
		err = c.runtime.children.during(func() error {
			return c.run(encoded, Streams{}, nil, "update", "--resources", "-", c.id)
		})
	}
	if err != nil {
		return errors.Join(err, before.restore(), undo())
	}
	return keepOOMScoreAdj(c.bundle, oomScoreAdj)
}

// NotifyOOM is of Container.
func (c *commandContainer) NotifyOOM() (<-chan struct{}, error) { return notifyOOM(c.cgroups) }

// Delete is of Container.
func (c *commandContainer) Delete() error {
	if err := killCgroup(c.cgroups, "", unix.SIGKILL); err != nil {
		return err
	}
	err := c.runtime.children.during(func() error { return c.run(nil, Streams{}, nil, "delete", "--force", c.id) })
	if err != nil && c.known() {
		return err
	}
	return c.runtime.removeFiles(c.id)
}

// removeFiles removes a container's directories, and with the last ones those of
// the runtime. A create that was killed leaves a state that the runtime itself
// does not take for one, and runsc locks, in files that begin with the id.
func (r *Command) removeFiles(id string) error {
	r.dirs.Lock()
	defer r.dirs.Unlock()
	states, err := filepath.Glob(filepath.Join(r.root, id+"*"))
	for _, path := range append(states, filepath.Join(r.bundles, id)) {
		err = errors.Join(err, os.RemoveAll(path))
	}
	if err != nil {
		return err
	}
	for _, dir := range []string{r.bundles, r.root, filepath.Dir(r.root)} {
		if os.Remove(dir) != nil {
			break // it is not empty
		}
	}
	return nil
}

// known reports whether the runtime still has a state of the container.
func (c *commandContainer) known() bool {
	err := c.runtime.children.during(func() error { return c.run(nil, Streams{}, nil, "state", c.id) })
	return err == nil
}
