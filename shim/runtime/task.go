package runtime

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/errdefs"
	"github.com/containerd/errdefs/pkg/errgrpc"
	"github.com/containerd/ttrpc"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/environ"
)

// Task is a runtime that is a shim of containerd's, version 2, such as
// containerd-shim-runc-v2: a server of the task API, started by its own verb
// "start", which is the parent of the container's processes
// (https://github.com/containerd/containerd/blob/main/core/runtime/v2/README.md).
// Shims that group do so by the annotation io.kubernetes.cri.sandbox-id, so a pod
// has one. They live on when the supervisor dies, and Load finds them.
type Task struct {
	program       []string // path and arguments
	bundles       string   // a directory for each container: config.json, task.json
	systemdCgroup bool
	children      *children
	events        *eventSink
	dirs          sync.Mutex // held while directories of containers come and go
}

// NewTask starts shims by a program, its path and further arguments. What is
// kept of its containers is below root. From now on this process is a sub-reaper,
// and Builtin reaps what has no owner.
func NewTask(program []string, root string, systemdCgroup bool, builtin *Builtin) *Task {
	builtin.children.adopt()
	return &Task{program: program, systemdCgroup: systemdCgroup, bundles: filepath.Join(root, "bundles"), children: builtin.children, events: newEventSink(root)}
}

// Features is of Runtime. The task API has no cgroups for execs.
func (*Task) Features() Features { return Features{Adoption: true} }

// callLimit bounds calls that a shim has no reason to think about for long.
const callLimit = 30 * time.Second

// Create is of Runtime.
func (r *Task) Create(id, _ string, spec *specs.Spec, streams Streams) (Container, *Process, error) {
	if streams.Terminal {
		return nil, nil, fmt.Errorf("a terminal: handlers of type shim have none yet: %w", errdefs.ErrNotImplemented)
	}
	if err := errors.Join(clampOOMScoreAdj(spec.Process), checkText(spec.Process)); err != nil {
		return nil, nil, err
	}
	c := &taskContainer{runtime: r, id: id, bundle: filepath.Join(r.bundles, id)}
	init, err := c.create(spec, streams)
	if err != nil {
		return nil, nil, errors.Join(err, c.Delete())
	}
	return c, init, nil
}

// checkText refuses an environment that JSON cannot carry: what a shim executes
// gets no descriptors of ours.
func checkText(process *specs.Process) error {
	_, block, err := environ.Take(process.Env)
	if err == nil && block != nil {
		err = fmt.Errorf("a variable has bytes that are not UTF-8: handlers of type shim cannot pass it on: %w", errdefs.ErrNotImplemented)
	}
	return err
}

// Abort is of Runtime: what a shim is doing ends with its own limits.
func (*Task) Abort(string) error { return nil }

// Load is of Runtime.
func (r *Task) Load(id string) (Container, error) {
	c := &taskContainer{runtime: r, id: id, bundle: filepath.Join(r.bundles, id)}
	content, err := os.ReadFile(c.file())
	if errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("load container %s: %w: %w", id, errdefs.ErrNotFound, err)
	}
	if err == nil {
		err = json.Unmarshal(content, &c.known)
	}
	c.made = true
	if err == nil {
		err = r.events.serve()
	}
	if err == nil {
		c.log, err = openTaskLog(c.bundle)
	}
	if err == nil {
		err = c.connect()
	}
	if err != nil {
		return nil, fmt.Errorf("load container %s: %w", id, err)
	}
	return c, nil
}

var _ Parent = (*taskContainer)(nil)

// taskContainer is a container of a Task.
type taskContainer struct {
	runtime *Task
	id      string
	bundle  string
	known   taskKnown
	task    task.TTRPCTaskService
	close   func() error
	log     *taskLog
	made    bool // the shim has made the container
	execs   execNumbers
}

// taskKnown is what a successor has to know of the container.
type taskKnown struct {
	Address string            `json:"address"`
	Cgroups map[string]string `json:"cgroups"` // by controller, "" for version 2; none if not of the node
}

func (c *taskContainer) file() string { return filepath.Join(c.bundle, "task.json") }

func (c *taskContainer) create(spec *specs.Spec, streams Streams) (*Process, error) {
	if err := errors.Join(c.runtime.makeBundle(c.bundle), c.runtime.events.serve()); err != nil {
		return nil, err
	}
	old := *spec
	old.Version = oldestVersion
	if err := writeJSON(filepath.Join(c.bundle, "config.json"), &old); err != nil {
		return nil, err
	}
	var err error
	if c.log, err = openTaskLog(c.bundle); err != nil {
		return nil, err
	}
	err = c.runtime.children.during(func() (err error) {
		c.known.Address, err = c.runtime.start(c.id, c.bundle)
		return err
	})
	if err == nil {
		err = c.connect()
	}
	if err == nil {
		err = writeJSON(c.file(), c.known) // from here on Delete finds it
	}
	if err != nil {
		return nil, err
	}
	options, err := c.runtime.options()
	if err != nil {
		return nil, err
	}
	stdin, stdout, stderr := pathOf(streams.Stdin), pathOf(streams.Stdout), pathOf(streams.Stderr)
	made, err := c.task.Create(context.Background(), &task.CreateTaskRequest{ID: c.id, Bundle: c.bundle, Stdin: stdin, Stdout: stdout, Stderr: stderr, Options: options})
	if err != nil {
		if errors.Is(err, ttrpc.ErrClosed) {
			err = fmt.Errorf("%w: %s", err, c.log.last())
		}
		return nil, taskError("create", err)
	}
	c.made = true
	return c.found(int(made.GetPid()), "")
}

// found opens a process that the shim has started; its exec id is "" for init.
func (c *taskContainer) found(pid int, exec string) (*Process, error) {
	p, err := openProcess(pid)
	if exec != "" && (errors.Is(err, unix.ESRCH) || errors.Is(err, os.ErrNotExist)) {
		p, err = &Process{PID: pid}, nil // its parent has reaped it, and keeps its exit
	}
	if err != nil {
		return nil, fmt.Errorf("the shim's process: %w", err)
	}
	if exec == "" {
		// Those of a shim whose containers are machines say little of them.
		if c.known.Cgroups, err = cgroupsOf(pid); err == nil {
			err = writeJSON(c.file(), c.known)
		}
		if err != nil {
			return nil, errors.Join(err, p.Close())
		}
	}
	p.reap = func() (syscall.WaitStatus, bool) { return c.exitOf(exec) }
	return p, nil
}

// Exit is of Parent.
func (c *taskContainer) Exit() (syscall.WaitStatus, bool) {
	answer, err := c.task.Wait(context.Background(), &task.WaitRequest{ID: c.id})
	return statusOf(answer.GetExitStatus()), err == nil
}

// exitOf asks the shim, which is the parent, for the exit of an ended process,
// and has it forget an exec.
func (c *taskContainer) exitOf(exec string) (syscall.WaitStatus, bool) {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	answer, err := c.task.Wait(ctx, &task.WaitRequest{ID: c.id, ExecID: exec})
	if err != nil {
		return 0, false
	}
	if exec != "" {
		_, _ = c.task.Delete(ctx, &task.DeleteRequest{ID: c.id, ExecID: exec})
	}
	return statusOf(answer.GetExitStatus()), true
}

// statusOf is a status that says what a shim's number does, which is 128 and the
// signal for a process that was ended by one.
func statusOf(code uint32) syscall.WaitStatus { return syscall.WaitStatus(code&0xff) << 8 }

// Start is of Container.
func (c *taskContainer) Start() error {
	_, err := c.task.Start(context.Background(), &task.StartRequest{ID: c.id})
	return taskError("start", err)
}

// Started is of Container: the runtime behind the shim has run the hooks.
func (*taskContainer) Started() error { return nil }

// Exec is of Container. Only the process itself is ended by KillTree.
func (c *taskContainer) Exec(spec *specs.Process, streams Streams) (*Process, error) {
	if streams.Terminal {
		return nil, fmt.Errorf("a terminal: handlers of type shim have none yet: %w", errdefs.ErrNotImplemented)
	}
	process, err := anyOf("Process", spec)
	if err = errors.Join(err, checkText(spec)); err != nil {
		return nil, err
	}
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	go cgroup.WarmLock() // one write(2)
	id := c.execs.next()
	_, err = c.task.Exec(ctx, &task.ExecProcessRequest{
		ID: c.id, ExecID: id, Spec: process, Stdin: pathOf(streams.Stdin), Stdout: pathOf(streams.Stdout), Stderr: pathOf(streams.Stderr),
	})
	if err != nil {
		return nil, taskError("exec", err)
	}
	started, err := c.task.Start(ctx, &task.StartRequest{ID: c.id, ExecID: id})
	if err != nil {
		_, _ = c.task.Delete(ctx, &task.DeleteRequest{ID: c.id, ExecID: id})
		return nil, taskError("exec", err)
	}
	return c.found(int(started.GetPid()), id)
}

// anyOf is a part of a runtime-spec, as containerd's typeurl names it.
func anyOf(kind string, value any) (*anypb.Any, error) {
	encoded, err := json.Marshal(value)
	return &anypb.Any{TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/" + kind, Value: encoded}, err
}

// SignalAll is of Container.
func (c *taskContainer) SignalAll(sig syscall.Signal) error {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	_, err := c.task.Kill(ctx, &task.KillRequest{ID: c.id, Signal: uint32(sig), All: true})
	if err = taskError("kill", err); errdefs.IsNotFound(err) {
		err = nil // it has ended
	}
	return errors.Join(err, killCgroup(c.known.Cgroups, "", sig))
}

// EndExecs is of Container: the shim knows what it has started, and keeps it.
func (*taskContainer) EndExecs() error { return nil }

// Cgroups is of Container.
func (c *taskContainer) Cgroups() map[string]string { return c.known.Cgroups }

// NotifyOOM is of Container.
func (c *taskContainer) NotifyOOM() (<-chan struct{}, error) {
	return (&commandContainer{id: c.id, cgroups: c.known.Cgroups}).NotifyOOM()
}

// Update is of Container; see commandContainer.Update.
func (c *taskContainer) Update(wanted *specs.LinuxResources, oomScoreAdj *int) (err error) {
	undo := func() error { return nil }
	if oomScoreAdj != nil {
		if undo, err = setOOMScoreAdj(c.known.Cgroups, *oomScoreAdj); err != nil {
			return err
		}
	}
	resources, err := anyOf("LinuxResources", wanted)
	if err != nil {
		return err
	}
	before := readLimits(c.known.Cgroups, wanted.Unified)
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	if _, err := c.task.Update(ctx, &task.UpdateTaskRequest{ID: c.id, Resources: resources}); err != nil {
		return errors.Join(taskError("update", err), before.restore(), undo())
	}
	return nil
}

// taskError is an error of a shim with its kind.
func taskError(verb string, err error) error {
	if err == nil {
		return nil
	}
	err = fmt.Errorf("shim: %s: %w", verb, errgrpc.ToNative(err))
	if isContainersFault(err.Error()) {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return err
}
