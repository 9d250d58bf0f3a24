package supervisor

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/minicri/minicri/shim/api"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/system"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// container is one container of the pod. Its state follows from facts: exit
// (stopped), paused, record.StartedAt (running), else created.
type container struct {
	sup       *Supervisor
	lib       *libcontainer.Container
	init      *os.Process // a pidfd of init
	io        *stdio
	stdinOnce bool
	adopted   bool
	exited    chan struct{} // closed when exit is set and on disk

	startEvent sync.Once
	oomWatched chan struct{} // closed when no notice of an OOM kill can come any more

	op sync.Mutex // one change at a time; may be held for long

	mu        sync.Mutex // guards what follows
	record    record
	paused    bool
	killed    bool // we sent SIGKILL: not the kernel for lack of memory
	oom       oomCount
	neverRan  bool        // init has ended and never executed the program
	initWords chan []byte // what init says behind the barrier; nil before
	exit      *api.ExitRecord
	execs     map[string]*exec
	leftover  []string // cgroups of ended execs with background children
}

// create makes a container whose init waits at the exec barrier. On an error
// nothing is left.
func (s *Supervisor) create(request *api.CreateRequest) (*container, error) {
	spec, err := readSpec(request.Bundle)
	if err != nil {
		return nil, fmt.Errorf("create container %s: %w: %w", request.Id, errdefs.ErrInvalidArgument, err)
	}
	c := &container{
		sup: s, stdinOnce: request.StdinOnce, exited: make(chan struct{}), execs: map[string]*exec{},
		record: record{
			Version: recordVersion, ID: request.Id, LogPath: request.LogPath,
			Terminal: spec.Process.Terminal, CreatedAt: time.Now().UnixNano(),
		},
	}
	c.op.Lock()
	defer c.op.Unlock()
	if err := s.reserve(c); err != nil {
		return nil, err
	}
	if err := c.build(request, spec); err != nil {
		s.forget(request.Id)
		return nil, fmt.Errorf("create container %s: %w", request.Id, err)
	}
	s.events.publish(api.EventKind_EVENT_CREATED, c.state())
	return c, nil
}

func (c *container) build(request *api.CreateRequest, spec *specs.Spec) error {
	process, err := newProcess(spec.Process)
	if err != nil {
		return err
	}
	process.Init = true
	var config *configs.Config
	// A user namespace that is joined is looked at by a helper process.
	err = c.sup.reaper.during(func() (err error) {
		config, err = toConfig(spec, request.Id, c.sup.systemdCgroup, c.sup.noNewKeyring)
		return err
	})
	if err != nil {
		return err
	}
	if c.lib, err = libcontainer.Create(filepath.Join(c.sup.dir, "containers"), request.Id, config); err != nil {
		return err
	}
	if err := c.launch(request, process); err != nil {
		return errors.Join(err, destroy(c.lib, process), removeFifos(c.sup.dir, request.Id), os.RemoveAll(c.sup.recordPath(request.Id)))
	}
	c.watchOOM()
	c.io.run()
	go c.awaitInit(process)
	return nil
}

// launch brings init to the barrier, with its streams.
func (c *container) launch(request *api.CreateRequest, process *libcontainer.Process) error {
	streams, childEnds, err := openStdio(c.sup.dir, request, c.record.Terminal, process)
	if err != nil {
		return err
	}
	c.io = streams
	master, err := c.sup.startProcess(c.lib, process, c.record.Terminal)
	childEnds()
	if err != nil {
		err = initError(process, err)
	}
	if err == nil && master != nil {
		streams.takeTerminal(master)
	}
	if err == nil {
		err = c.identify(process)
	}
	if err != nil {
		streams.close()
	}
	return err
}

// startProcess starts an init or an exec and returns the master of its
// terminal, if it has one. Its pid is the caller's to wait for and to disown.
func (s *Supervisor) startProcess(lib *libcontainer.Container, process *libcontainer.Process, terminal bool) (*os.File, error) {
	var socket *os.File
	if terminal {
		ours, inits, err := consolePair()
		if err != nil {
			return nil, err
		}
		defer ours.Close()
		defer inits.Close()
		process.ConsoleSocket, socket = inits, ours
	}
	if _, err := s.reaper.own(func() (int, error) {
		if err := lib.Start(process); err != nil {
			return 0, err
		}
		return process.Pid()
	}); err != nil {
		return nil, err
	}
	if !terminal {
		return nil, nil
	}
	return receiveMaster(socket)
}

// identify records who init is, so that a successor can adopt it.
func (c *container) identify(process *libcontainer.Process) error {
	pid, err := process.Pid()
	if err != nil {
		return err
	}
	stat, err := system.Stat(pid)
	if err != nil {
		return err
	}
	if c.init, err = os.FindProcess(pid); err != nil {
		return err
	}
	state, err := c.lib.State()
	if err != nil {
		return err
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	c.record.PID, c.record.StartTime, c.record.Cgroups = pid, stat.StartTime, state.CgroupPaths
	return writeJSON(c.sup.recordPath(c.record.ID), c.record)
}

// start lets init through the barrier.
func (c *container) start() error {
	c.op.Lock()
	defer c.op.Unlock()
	if status := c.state().Status; status != api.Status_STATUS_CREATED {
		return fmt.Errorf("start container %s: it is %v: %w", c.record.ID, status, errdefs.ErrFailedPrecondition)
	}
	c.setStarted(time.Now().UnixNano())
	c.listenToInit()
	if err := c.lib.Exec(); err != nil {
		c.setStarted(0)
		return fmt.Errorf("start container %s: %w", c.record.ID, err)
	}
	if err := c.awaitProgram(); err != nil {
		return fmt.Errorf("start container %s: %w", c.record.ID, err)
	}
	if err := writeJSON(c.sup.recordPath(c.record.ID), c.snapshot()); err != nil {
		c.sup.log.Error("the start of a container is not on disk", "container", c.record.ID, "error", err)
	}
	c.announceStart()
	return nil
}

// announceStart publishes the start once: before the exit, however quick.
func (c *container) announceStart() {
	c.startEvent.Do(func() { c.sup.events.publish(api.EventKind_EVENT_STARTED, c.state()) })
}

func (c *container) setStarted(at int64) {
	c.mu.Lock()
	c.record.StartedAt = at
	c.mu.Unlock()
}

func (c *container) snapshot() record {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.record
}

// state is the container as clients see it.
func (c *container) state() *api.Container {
	c.mu.Lock()
	defer c.mu.Unlock()
	state := &api.Container{
		Id: c.record.ID, Pid: int32(c.record.PID), StartTime: c.record.StartTime, Adopted: c.adopted,
		LogPath: c.record.LogPath, CreatedAt: c.record.CreatedAt, StartedAt: c.record.StartedAt,
	}
	switch {
	case c.exit != nil:
		state.Status = api.Status_STATUS_STOPPED
		state.Exit = &api.Exit{
			Code: c.exit.Code, CodeKnown: c.exit.CodeKnown, OomKilled: c.exit.OOMKilled,
			FinishedAt: c.exit.FinishedAt, StartError: c.exit.StartError,
		}
	case c.paused:
		state.Status = api.Status_STATUS_PAUSED
	case c.record.StartedAt != 0:
		state.Status = api.Status_STATUS_RUNNING
	default:
		state.Status = api.Status_STATUS_CREATED
	}
	return state
}

// kill signals init, or every process of the container. A signal to a stopped
// container is ErrNotFound.
func (c *container) kill(sig syscall.Signal, all bool) error {
	c.mu.Lock()
	stopped, cgroups := c.exit != nil, c.record.Cgroups
	c.killed = c.killed || sig == syscall.SIGKILL
	c.mu.Unlock()
	if stopped {
		return fmt.Errorf("kill container %s: it has ended: %w", c.record.ID, errdefs.ErrNotFound)
	}
	var err error
	if all {
		err = killCgroup(cgroups, "", sig)
	}
	// A privileged init may have moved to a cgroup outside.
	if !all || sig == syscall.SIGKILL {
		if killErr := c.init.Signal(sig); !errors.Is(killErr, os.ErrProcessDone) {
			err = errors.Join(err, killErr)
		}
	}
	if err != nil {
		return fmt.Errorf("kill container %s: %w", c.record.ID, err)
	}
	if sig == syscall.SIGKILL {
		thaw(cgroups)
	}
	return nil
}

// deletePatience is how long delete waits for killed processes to be gone.
const deletePatience = 3 * time.Second

// delete removes a stopped container. It may be called again after an error.
func (c *container) delete() error {
	c.op.Lock()
	defer c.op.Unlock()
	select {
	case <-c.exited:
	default:
		return fmt.Errorf("delete container %s: it has not ended: %w", c.record.ID, errdefs.ErrFailedPrecondition)
	}
	if err := c.destroyPatiently(); err != nil {
		return fmt.Errorf("delete container %s: %w: %w", c.record.ID, errdefs.ErrUnavailable, err)
	}
	exit := filepath.Join(c.sup.dir, api.ExitDir, c.record.ID+".json")
	if err := errors.Join(removeFifos(c.sup.dir, c.record.ID), os.RemoveAll(exit), os.RemoveAll(c.sup.recordPath(c.record.ID))); err != nil {
		return fmt.Errorf("delete container %s: %w", c.record.ID, err)
	}
	c.sup.forget(c.record.ID)
	c.sup.events.publish(api.EventKind_EVENT_DELETED, c.state())
	return nil
}

// destroyPatiently kills what is left in the cgroup and removes it: processes
// may take a while to go, for example in D state.
func (c *container) destroyPatiently() error {
	if c.lib == nil {
		return nil
	}
	for deadline := time.Now().Add(deletePatience); ; {
		_ = killCgroup(c.record.Cgroups, "", syscall.SIGKILL)
		err := c.lib.Destroy()
		if err == nil || time.Now().After(deadline) {
			return err
		}
	}
}
