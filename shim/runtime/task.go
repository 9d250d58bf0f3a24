package runtime

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/environ"
)

// Task is a runtime that is a shim of containerd's, version 2, such as
// containerd-shim-runc-v2: a server of the task API, started by its own verb
// "start", which is the parent of the container's processes
// (https://github.com/containerd/containerd/blob/main/core/runtime/v2/README.md).
// Shims that group do so by the annotation io.kubernetes.cri.sandbox-id, so a pod
// has one. They live on when the supervisor dies, and Load finds them. What a shim
// says of its processes is not believed before it is checked.
type Task struct {
	program       []string // path and arguments
	bundles       string   // a directory for each container: config.json, task.json
	systemdCgroup bool
	children      *children
	events        *Events
	dirs          sync.Mutex // held while directories of containers come and go

	mu       sync.Mutex // guards what follows
	creating map[string]*taskContainer
	shims    map[string]shimProcess // by address
	mostKept int                    // with so many of them those that have ended are forgotten
}

// NewTask starts shims by a program, its path and further arguments. What is
// kept of its containers is below root; the shims publish to events. From now on
// this process is a sub-reaper, and Builtin reaps what has no owner.
func NewTask(program []string, root string, systemdCgroup bool, builtin *Builtin, events *Events) *Task {
	builtin.children.adopt()
	return &Task{
		program: program, systemdCgroup: systemdCgroup, bundles: filepath.Join(root, "bundles"),
		children: builtin.children, events: events, creating: make(map[string]*taskContainer),
		shims: make(map[string]shimProcess),
	}
}

// Features is of Runtime.
func (*Task) Features() Features { return Features{Adoption: true, ExecTrees: true} }

const (
	// callLimit bounds calls that a shim has no reason to think about for long,
	// endLimit those of them that are made to end something: then it is killed.
	callLimit = 30 * time.Second
	endLimit  = 10 * time.Second
)

// Create is of Runtime.
func (r *Task) Create(id, _ string, spec *specs.Spec, streams Streams) (Container, *Process, error) {
	if err := errors.Join(clampOOMScoreAdj(spec.Process), checkText(spec.Process)); err != nil {
		return nil, nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), longRun)
	defer cancel()
	c := &taskContainer{runtime: r, id: id, bundle: filepath.Join(r.bundles, id), abort: cancel}
	r.setCreating(id, c)
	defer r.setCreating(id, nil)
	init, err := c.create(ctx, spec, streams)
	if err != nil {
		return nil, nil, errors.Join(err, c.Delete())
	}
	return c, init, nil
}

func (r *Task) setCreating(id string, c *taskContainer) {
	r.mu.Lock()
	defer r.mu.Unlock()
	if c == nil {
		delete(r.creating, id)
		return
	}
	r.creating[id] = c
}

// checkText refuses an environment that JSON cannot carry: what a shim executes
// gets no descriptors of ours.
func checkText(process *specs.Process) error {
	_, block, err := environ.Take(process.Env)
	if err == nil && block != nil {
		err = fmt.Errorf("a variable has bytes that are not UTF-8: handlers of type shim cannot pass it on: %w", errdefs.ErrInvalidArgument)
	}
	return err
}

// Abort is of Runtime: what the shim runs for the container is ended, hooks above
// all; a shim that does not answer then is not waited for any longer.
func (r *Task) Abort(id string) error {
	r.mu.Lock()
	c := r.creating[id]
	r.mu.Unlock()
	if c == nil {
		return nil
	}
	c.aborted.Store(true)
	if shim, known := r.shimAt(c.address()); known {
		endHelpers(shim.PID, id)
	}
	time.AfterFunc(abortTimeout, c.abort)
	return nil
}

// abortTimeout is how long a shim may take to see that what it runs was killed.
const abortTimeout = time.Second

var (
	_ Parent  = (*taskContainer)(nil)
	_ Relayed = (*taskContainer)(nil)
	_ Aborter = (*taskContainer)(nil)
)

// taskContainer is a container of a Task.
type taskContainer struct {
	runtime     *Task
	id          string
	bundle      string
	known       taskKnown
	task        task.TTRPCTaskService
	close       func() error
	log         *taskLog
	made        bool // the shim has made the container
	abort       context.CancelFunc
	aborted     atomic.Bool // its runtime may have been killed, and have left its state
	execCgroups *execCgroups
	mu          sync.Mutex         // guards known.Address while the container is made, starting and aborts
	starting    context.CancelFunc // nil unless the shim is asked to start it
	aborts      []*time.Timer      // of the start: stopped when it returns
}

func (c *taskContainer) address() string {
	c.mu.Lock()
	defer c.mu.Unlock()
	return c.known.Address
}

func (c *taskContainer) create(ctx context.Context, spec *specs.Spec, streams Streams) (*Process, error) {
	if err := c.startShim(spec); err != nil {
		return nil, err
	}
	console, err := newTaskConsole(streams)
	if err != nil {
		return nil, err
	}
	defer console.close()
	options, err := c.runtime.options()
	if err != nil {
		return nil, err
	}
	moving, moved := context.WithCancel(ctx)
	defer moved()
	go cgroup.KeepLockWarm(moving)
	made, err := c.task.Create(ctx, &task.CreateTaskRequest{
		ID: c.id, Bundle: c.bundle, Options: options,
		Terminal: streams.Terminal, Stdin: console.stdin, Stdout: console.stdout, Stderr: console.stderr,
	})
	if err != nil {
		if errors.Is(err, ttrpc.ErrClosed) {
			err = fmt.Errorf("%w: %s", err, c.log.last())
		}
		return nil, taskError("create", err)
	}
	c.made = true
	init, err := c.foundInit(int(made.GetPid()), spec.Linux.CgroupsPath)
	if err == nil {
		init.Terminal = console.take()
	}
	return init, err
}

// startShim writes the bundle, starts the shim or finds that of the pod, and
// connects to it.
func (c *taskContainer) startShim(spec *specs.Spec) error {
	if err := errors.Join(c.runtime.makeBundle(c.bundle), c.runtime.events.serve()); err != nil {
		return err
	}
	old := *spec
	old.Version = oldestVersion
	if err := writeJSON(filepath.Join(c.bundle, "config.json"), &old); err != nil {
		return err
	}
	var err error
	if c.log, err = openTaskLog(c.bundle); err != nil {
		return err
	}
	if !c.joinShim(spec) {
		var address taskAddress
		err = c.runtime.children.during(func() (err error) {
			address, err = c.runtime.start(c.id, c.bundle)
			return err
		})
		c.noteAddress(address)
		if err == nil {
			err = c.connect()
		}
	}
	if err == nil {
		err = c.findShim()
	}
	if err == nil {
		err = writeJSON(c.file(), c.known) // from here on Delete finds it
	}
	return err
}

func (c *taskContainer) noteAddress(address taskAddress) {
	c.mu.Lock()
	defer c.mu.Unlock()
	c.known.taskAddress, c.known.Program = address, c.runtime.program
}

// Exit is of Parent.
func (c *taskContainer) Exit() (status syscall.WaitStatus, at time.Time, known bool) {
	answer, err := c.task.Wait(context.Background(), &task.WaitRequest{ID: c.id})
	if answer.GetExitedAt().IsValid() {
		at = answer.GetExitedAt().AsTime()
	}
	return statusOf(answer.GetExitStatus()), at, err == nil
}

// SignalAll is of Container. Cgroups are enough where there are any; a shim that
// does not answer would be waited for.
func (c *taskContainer) SignalAll(sig syscall.Signal) error {
	if len(c.known.Cgroups) > 0 {
		return killCgroup(c.known.Cgroups, "", sig)
	}
	ctx, cancel := context.WithTimeout(context.Background(), endLimit)
	defer cancel()
	_, err := c.task.Kill(ctx, &task.KillRequest{ID: c.id, Signal: uint32(sig), All: true})
	if err = taskError("kill", err); errdefs.IsNotFound(err) {
		return nil // it has ended
	}
	return err
}

// EndExecs is of Container.
func (c *taskContainer) EndExecs() error {
	return errors.Join(c.execCgroups.endAll(), c.endNotedExecs())
}

// Cgroups is of Container.
func (c *taskContainer) Cgroups() map[string]string { return c.known.Cgroups }

// NotifyOOM is of Container.
func (c *taskContainer) NotifyOOM() (<-chan struct{}, error) {
	return (&commandContainer{id: c.id, cgroups: c.known.Cgroups}).NotifyOOM()
}
