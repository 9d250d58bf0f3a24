package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"net"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/supervisor/cgroup"
	"github.com/minicri/minicri/supervisor/children"
	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/supervisor/stdio"
)

// Runtime is what all containers of a supervisor share.
type Runtime struct {
	Dir           string // of the supervisor: containers' states are below it
	SystemdCgroup bool   // cgroupsPath is slice:prefix:name
	Children      *children.Children
	Starters      *starter.Starters
	Launcher      *launch.Launcher
}

// Facts are all that has to be known of a container, in the supervisor's record.
type Facts struct {
	ID          string       `json:"id"`
	Bundle      string       `json:"bundle"`
	Program     []string     `json:"runtime,omitempty"` // with runc's command line, and its flags; none for libcontainer
	CgroupsPath string       `json:"cgroups_path"`
	Cgroups     cgroup.Paths `json:"cgroups,omitempty"` // by controller, "" for version 2
	MountLabel  string       `json:"mount_label,omitempty"`
	Poststart   bool         `json:"poststart,omitempty"`    // it has such hooks
	Poststop    bool         `json:"poststop,omitempty"`     // it has such hooks
	ExecCgroups string       `json:"exec_cgroups,omitempty"` // of starter.Answer
}

// FactsOf returns what is known of a container before it is made.
func FactsOf(id, bundle string, program []string, spec *specs.Spec) Facts {
	return Facts{
		ID: id, Bundle: bundle, Program: program, CgroupsPath: spec.Linux.CgroupsPath, MountLabel: spec.Linux.MountLabel,
		Poststart: spec.Hooks != nil && len(spec.Hooks.Poststart) > 0,
		Poststop:  spec.Hooks != nil && len(spec.Hooks.Poststop) > 0,
	}
}

// Streams are the standard streams of a process that is started. Those left nil are
// /dev/null; with Terminal all of them are. They are the caller's to close.
type Streams struct {
	Stdio    [3]*os.File
	Terminal bool
}

// Container is a container, made or to be made.
type Container struct {
	Facts
	runtime *Runtime
	execs   *cgroup.Execs
}

// Container returns the container that facts are of.
func (r *Runtime) Container(facts Facts) *Container {
	c := &Container{Facts: facts, runtime: r}
	c.execs = cgroup.NewExecs(c.Cgroups, c.dir())
	return c
}

// Directories of containers' states, below the supervisor's.
const (
	StatesDir   = "containers" // libcontainer's, and those of launched pauses
	ProgramsDir = "oci"        // of programs: they do not read each other's
)

// root is where the engine that has made the container keeps its states.
func (c *Container) root() string {
	if len(c.Program) > 0 {
		return filepath.Join(c.runtime.Dir, ProgramsDir, filepath.Base(c.Program[0]))
	}
	return filepath.Join(c.runtime.Dir, StatesDir)
}

func (c *Container) dir() string { return filepath.Join(c.root(), c.ID) }

func (c *Container) request(verb starter.Verb) starter.Request {
	return starter.Request{
		Verb: verb, ID: c.ID, Bundle: c.Bundle, Root: c.root(), Program: c.Program, SystemdCgroup: c.runtime.SystemdCgroup,
		CgroupsPath: c.CgroupsPath, Cgroups: c.Cgroups,
	}
}

// Create makes the container and brings its init to the exec barrier; hooks get the
// bundle as its directory. After an error nothing is left. errdefs.ErrFailedPrecondition
// says that init ran and could not get there: the container asks for what it does not
// have. ended, if any, is called when init has ended, before it is reaped.
func (c *Container) Create(ctx context.Context, spec *specs.Spec, streams Streams, bare bool, ended func(pid int)) (*Process, error) {
	if bare && len(c.Program) == 0 && launch.CanPause(spec) {
		return c.launchPause(ctx, spec)
	}
	p, err := c.run(ctx, c.request(starter.Create), streams, ended, func(answer starter.Answer) {
		c.Cgroups, c.ExecCgroups = answer.Cgroups, answer.ExecCgroups
		c.execs = cgroup.NewExecs(c.Cgroups, c.dir())
	})
	if err != nil {
		// What the starter has made is left.
		return nil, errors.Join(err, RemoveState(c.dir(), c.Cgroups, c.CgroupsPath, c.runtime.SystemdCgroup))
	}
	return p, nil
}

func (c *Container) launchPause(ctx context.Context, spec *specs.Spec) (*Process, error) {
	if err := os.MkdirAll(c.dir(), 0o711); err != nil {
		return nil, err
	}
	made, err := c.runtime.Launcher.Pause(ctx, launch.Pause{ID: c.ID, Dir: c.dir(), Spec: spec, SystemdCgroup: c.runtime.SystemdCgroup})
	if err != nil {
		return nil, errors.Join(err, RemoveState(c.dir(), nil, c.CgroupsPath, c.runtime.SystemdCgroup))
	}
	c.Cgroups = made.Cgroups
	return launched(made), nil
}

// run has a starter make a process, and takes it over; note is called with the answer.
func (c *Container) run(ctx context.Context, request starter.Request, streams Streams, ended func(pid int), note func(starter.Answer)) (p *Process, err error) {
	var files []*os.File
	for i, file := range streams.Stdio {
		if file != nil {
			request.Streams[i] = true
			files = append(files, file)
		}
	}
	var console *net.UnixConn
	if streams.Terminal {
		ours, theirs, err := socket.Pair()
		if err != nil {
			return nil, err
		}
		defer ours.Close()
		defer theirs.Close()
		request.Terminal, console = true, ours
		files = append(files, theirs)
	}
	err = c.runtime.Starters.Run(ctx, request, files, func(answer starter.Answer) (err error) {
		if p, err = c.take(answer.PID, ended); err == nil && console != nil {
			p.Terminal, err = stdio.ReceiveMaster(console)
		}
		if err == nil && note != nil {
			note(answer)
		}
		return err
	})
	if err != nil && p != nil {
		err = errors.Join(err, p.Close())
	}
	if err != nil {
		return nil, err
	}
	return p, nil
}

// take makes a process of a starter that lives one of ours.
func (c *Container) take(pid int, ended func(pid int)) (*Process, error) {
	found, err := process.Find(pid)
	if err != nil {
		return nil, err
	}
	p := &Process{Facts: found.Facts, found: found}
	if p.child, err = c.runtime.Children.Own(pid, ended); err != nil {
		return nil, errors.Join(err, p.Close())
	}
	return p, nil
}

// Start lets init through the exec barrier, unless it has ended.
func (c *Container) Start(ctx context.Context, ended <-chan struct{}) error {
	if len(c.Program) > 0 {
		return c.runtime.Starters.Run(ctx, c.request(starter.Start), nil, nil)
	}
	return openBarrier(ctx, c.dir(), ended)
}

// Started is called once the program runs, for hooks that wait for it. Its error is a
// warning. A program has run its hooks itself.
func (c *Container) Started(ctx context.Context, init *Process) error {
	if !c.Poststart || len(c.Program) > 0 {
		return nil
	}
	request := c.request(starter.Start)
	request.InitPID = init.PID
	return c.runtime.Starters.Run(ctx, request, nil, nil)
}

// Exec starts a further process. It and what it starts can be ended together, by
// Process.KillTree.
func (c *Container) Exec(ctx context.Context, process *specs.Process, init *Process, streams Streams) (*Process, error) {
	if c.Cgroups.Frozen() {
		return nil, fmt.Errorf("container %s is frozen, and no process can be started in it: thaw its cgroup: %w", c.ID, errdefs.ErrFailedPrecondition)
	}
	var group *cgroup.Exec
	if len(c.Program) == 0 || c.ExecCgroups == starter.ExecCgroupByName || c.ExecCgroups == starter.ExecCgroupByPath && c.Cgroups[""] != "" {
		group = c.execs.New()
	}
	p, err := c.startExec(ctx, process, init, streams, group)
	if err != nil {
		if group != nil {
			err = errors.Join(err, group.Kill())
			group.Close()
		}
		return nil, err
	}
	p.group = group
	return p, nil
}

func (c *Container) startExec(ctx context.Context, process *specs.Process, init *Process, streams Streams, group *cgroup.Exec) (*Process, error) {
	if len(c.Program) == 0 {
		spec, err := ReadSpec(c.Bundle)
		if err != nil {
			return nil, err
		}
		if launch.CanExec(spec, process) {
			return c.launchExec(ctx, spec, process, init, streams, group)
		}
	}
	request := c.request(starter.Exec)
	request.Process = process
	if group != nil {
		request.ExecCgroup = starter.ExecCgroup{Controller: group.Controller, Sub: group.Sub, Form: c.ExecCgroups}
	}
	return c.run(ctx, request, streams, nil, nil)
}

func (c *Container) launchExec(ctx context.Context, spec *specs.Spec, process *specs.Process, init *Process, streams Streams, group *cgroup.Exec) (*Process, error) {
	if init.Gone() {
		return nil, os.ErrProcessDone
	}
	cgroups := c.Cgroups
	if group != nil {
		cgroups = group.Paths()
	}
	made, err := c.runtime.Launcher.Exec(ctx, launch.Exec{ID: c.ID, Init: init.found, Spec: spec, Process: process, Streams: streams.Stdio, Cgroups: cgroups})
	if err != nil {
		return nil, err
	}
	return launched(made), nil
}

// EndExecs ends the execs that an earlier supervisor has left, whose streams have no
// owner any more, and not what they have put in the background.
func (c *Container) EndExecs() error { return c.execs.EndAll() }

// Update sets resources, those that are named, and oom_score_adj if it is not nil, of
// all processes: all or with an error none. resources is a specs.LinuxResources.
func (c *Container) Update(ctx context.Context, resources json.RawMessage, oomScoreAdj *int) error {
	request := c.request(starter.Update)
	request.Resources, request.OOMScoreAdj = resources, oomScoreAdj
	return c.runtime.Starters.Run(ctx, request, nil, nil)
}

// Delete kills what is left of the container, and removes its cgroups and its state. It
// may be called again after an error.
func (c *Container) Delete(ctx context.Context) error {
	if len(c.Program) > 0 || c.Poststop {
		return c.runtime.Starters.Run(ctx, c.request(starter.Delete), nil, nil)
	}
	return RemoveState(c.dir(), c.Cgroups, c.CgroupsPath, c.runtime.SystemdCgroup)
}

// ProgramStates is the directory of a program's own states, below that of its containers.
const ProgramStates = "states"

// RemoveState ends what runs in a container's cgroups, removes them, and then what is
// kept of it: its directory, and what a program has. A create that was killed leaves a
// state that the program itself does not take for one, and runsc locks, in files that
// begin with the id. With the last container go the directories of the program.
func RemoveState(dir string, paths cgroup.Paths, cgroupsPath string, systemd bool) error {
	if err := cgroup.Remove(paths, cgroupsPath, systemd); err != nil {
		return fmt.Errorf("remove the cgroups %s: %w", cgroupsPath, err)
	}
	states := filepath.Join(filepath.Dir(dir), ProgramStates)
	left, err := filepath.Glob(filepath.Join(states, filepath.Base(dir)+"*"))
	for _, path := range append(left, dir) {
		err = errors.Join(err, os.RemoveAll(path))
	}
	if err != nil {
		return err
	}
	if root := filepath.Dir(dir); filepath.Base(root) != StatesDir {
		// Another container that goes at the same moment may have removed states, and
		// left the rest for this one.
		if err := os.Remove(states); err == nil || errors.Is(err, os.ErrNotExist) {
			_ = os.Remove(root) // unless it has other containers
		}
	}
	return nil
}

// ReadSpec reads the OCI runtime specification of a bundle. Paths in it are
// made absolute: nothing here depends on the working directory.
func ReadSpec(bundle string) (*specs.Spec, error) {
	path := filepath.Join(bundle, "config.json")
	content, err := os.ReadFile(path)
	if err != nil {
		return nil, fmt.Errorf("read the bundle: %w", err)
	}
	spec := new(specs.Spec)
	if err := json.Unmarshal(content, spec); err != nil {
		return nil, fmt.Errorf("parse %s: %w", path, err)
	}
	if spec.Root == nil || spec.Process == nil || spec.Linux == nil {
		return nil, fmt.Errorf("parse %s: root, process and linux are needed", path)
	}
	if !filepath.IsAbs(spec.Root.Path) {
		spec.Root.Path = filepath.Join(bundle, spec.Root.Path)
	}
	return spec, nil
}

// openBarrier lets init through, which waits until somebody reads from the fifo. It
// returns when init has said that it goes on.
func openBarrier(ctx context.Context, dir string, ended <-chan struct{}) error {
	path := filepath.Join(dir, launch.FIFOFile)
	// For both, so that what has not opened it yet is no end.
	fifo, err := os.OpenFile(path, os.O_RDWR|unix.O_NONBLOCK, 0)
	if errors.Is(err, os.ErrNotExist) {
		return fmt.Errorf("it was started before: %w", errdefs.ErrFailedPrecondition)
	}
	if err != nil {
		return fmt.Errorf("open the exec barrier: %w", err)
	}
	defer fifo.Close()
	waiting, over := context.WithCancelCause(ctx)
	defer over(nil)
	go func() { // ends with init, or with waiting
		select {
		case <-ended:
			over(errInitEnded)
		case <-waiting.Done():
		}
	}()
	defer context.AfterFunc(waiting, func() { _ = fifo.SetReadDeadline(time.Now()) })()
	if err := readBarrier(fifo); err != nil {
		if cause := context.Cause(waiting); cause != nil {
			err = cause
		}
		return fmt.Errorf("wait at the exec barrier: %w", err)
	}
	return os.Remove(path)
}

var errInitEnded = fmt.Errorf("the container's first process has ended: %w", errdefs.ErrFailedPrecondition)

// readBarrier reads the byte that init writes. A program that ends at once may be seen to
// have ended before that.
func readBarrier(fifo *os.File) error {
	_, err := fifo.Read(make([]byte, 1))
	if errors.Is(err, os.ErrDeadlineExceeded) {
		raw, rawErr := fifo.SyscallConn()
		if rawErr != nil {
			return rawErr
		}
		n := 0
		if rawErr := raw.Control(func(fd uintptr) { n, _ = unix.Read(int(fd), make([]byte, 1)) }); rawErr == nil && n > 0 {
			return nil
		}
	}
	return err
}
