package engine

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/cgroup"
	"github.com/minicri/minicri/supervisor/runtime"
	"github.com/minicri/minicri/supervisor/starter"
)

// programContainer is a container of a program with runc's command line, such as runc,
// crun and youki:
// https://github.com/opencontainers/runtime-tools/blob/master/docs/command-line-interface.md
// and the flags that runc has beyond it. Each verb is a run of the program. Root/ID is
// the container's directory, and has the bundle that the program gets; Root/states has
// the program's states.
type programContainer struct{ starter.Request }

func (c *programContainer) dir() string    { return filepath.Join(c.Root, c.ID) }
func (c *programContainer) states() string { return filepath.Join(c.Root, runtime.ProgramStates) }

func (c *programContainer) create(spec *specs.Spec, given streams) (answer starter.Answer, err error) {
	if err := c.writeBundle(spec); err != nil {
		return answer, errors.Join(fmt.Errorf("write the bundle of container %s: %w", c.ID, err), os.RemoveAll(c.dir()))
	}
	if answer.PID, err = c.launch(given, "create", "--bundle", c.dir()); err == nil {
		answer.Cgroups, err = c.findCgroups(answer.PID)
	}
	if err != nil {
		return answer, errors.Join(err, c.delete())
	}
	answer.ExecCgroups = c.askExecCgroups()
	return answer, nil
}

// oldestVersion is the version of the runtime-spec that bundles name. Runtimes
// refuse versions that are newer than they are (crun before 1.9 any but 1.0.x)
// and read what they know of fields that came later all the same.
const oldestVersion = "1.0.2"

func (c *programContainer) writeBundle(spec *specs.Spec) error {
	if err := c.makeDirectories(); err != nil {
		return err
	}
	old := *spec
	old.Version = oldestVersion
	return writeJSON(filepath.Join(c.dir(), "config.json"), &old)
}

// makeDirectories is tried again where the removal of the last other container removes
// them at the same moment.
func (c *programContainer) makeDirectories() (err error) {
	for range 10 {
		if err = errors.Join(os.MkdirAll(c.dir(), 0o700), os.MkdirAll(c.states(), 0o711)); !errors.Is(err, os.ErrNotExist) {
			break
		}
	}
	return err
}

// findCgroups returns init's cgroups: those that were made for the container. A
// process that is in none of them is another one.
func (c *programContainer) findCgroups(pid int) (map[string]string, error) {
	found, err := cgroupsOfProcess(pid)
	if err != nil {
		return nil, fmt.Errorf("cgroups of container %s: %w", c.ID, err)
	}
	of := made(found, c.CgroupsPath)
	if len(of) == 0 {
		return nil, fmt.Errorf("%s has put process %d of container %s into %v, not into %q", c.Program[0], pid, c.ID, found, c.CgroupsPath)
	}
	return of, nil
}

// cgroupsOfProcess are the cgroups of a process by controller, "" for version 2, as
// paths below the mount points.
func cgroupsOfProcess(pid int) (map[string]string, error) {
	own, err := cgroups.ParseCgroupFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil, err
	}
	if cgroups.IsCgroup2UnifiedMode() {
		return map[string]string{"": filepath.Join("/sys/fs/cgroup", own[""])}, nil
	}
	found := make(map[string]string)
	for controller, path := range own {
		if controller == "" {
			continue // the hybrid hierarchy has no controllers
		}
		root, mountErr := cgroups.FindCgroupMountpoint("", controller)
		if cgroups.IsNotFound(mountErr) {
			continue // named hierarchies that are mounted nowhere
		}
		if mountErr != nil {
			err = errors.Join(err, mountErr)
			continue
		}
		found[controller] = filepath.Join(root, path)
	}
	return found, err
}

// made are those of a process's cgroups that were made for the container: the rest may
// hold other processes, the supervisor above all.
func made(found map[string]string, cgroupsPath string) map[string]string {
	name := cgroupName(cgroupsPath)
	of := maps.Clone(found)
	maps.DeleteFunc(of, func(_, path string) bool { return name == "" || !slices.Contains(strings.Split(path, "/"), name) })
	return of
}

// cgroupName is the last part of the path that a spec's cgroupsPath asks for; of
// systemd's form, SLICE:PREFIX:NAME, that is the scope.
func cgroupName(cgroupsPath string) string {
	if parts := strings.Split(cgroupsPath, ":"); len(parts) == 3 {
		return parts[1] + "-" + parts[2] + ".scope"
	}
	if name := filepath.Base(cgroupsPath); name != "." && name != "/" {
		return name
	}
	return ""
}

// How a program takes the cgroup of an exec.
const (
	execCgroupPath   = "path" // --cgroup PATH, below the container's, version 2 alone: crun
	execCgroupByName = "name" // --cgroup [CONTROLLER:]PATH: runc
)

// askExecCgroups asks the program itself, by the help of its verb.
func (c *programContainer) askExecCgroups() string {
	help, _ := exec.Command(c.Program[0], "exec", "--help").CombinedOutput() // one without help has no such flag
	switch text := string(help); {
	case !strings.Contains(text, "--cgroup"):
		return ""
	case strings.Contains(text, "controller"):
		return execCgroupByName
	default:
		return execCgroupPath
	}
}

func (c *programContainer) exec(given streams) (int, error) {
	process, err := processOf(c.Request)
	if err != nil {
		return 0, err
	}
	scratch, err := os.MkdirTemp(c.dir(), "process-")
	if err != nil {
		return 0, err
	}
	defer os.RemoveAll(scratch)
	file := filepath.Join(scratch, "process.json")
	if err := writeJSON(file, process); err != nil {
		return 0, err
	}
	arguments := []string{"--detach", "--process", file}
	if group := c.ExecCgroup; group.Sub != "" {
		path := group.Sub
		if group.Controller != "" && group.Form == execCgroupByName {
			path = group.Controller + ":" + path
		}
		arguments = append(arguments, "--cgroup", path)
	}
	if process.OOMScoreAdj != nil { // crun leaves a command what it has inherited; one that may not be set stays
		_ = writeOOMScoreAdj(os.Getpid(), strconv.Itoa(*process.OOMScoreAdj))
	}
	return c.launch(given, "exec", arguments...)
}

func (c *programContainer) start() error { return c.run(nil, streams{}, nil, "start", c.ID) }

func (c *programContainer) setResources(wanted *specs.LinuxResources, _ *int) error {
	encoded, err := json.Marshal(wanted)
	if err != nil {
		return err
	}
	return c.run(encoded, streams{}, nil, "update", "--resources", "-", c.ID)
}

func (c *programContainer) delete() error {
	if err := cgroup.Paths(c.Cgroups).Signal(unix.SIGKILL); err != nil {
		return err
	}
	err := c.run(nil, streams{}, nil, "delete", "--force", c.ID)
	if err != nil && c.run(nil, streams{}, nil, "state", c.ID) == nil {
		return err // it still knows the container
	}
	return runtime.RemoveState(c.dir(), c.Cgroups, c.CgroupsPath, c.SystemdCgroup)
}
