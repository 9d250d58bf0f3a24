package supervisor

import (
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"sync"
	"sync/atomic"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/minicri/minicri/shim/api"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// exec is a further process of a container. It and all that it starts live in
// a child of the container's cgroup, so that they can be ended and nothing
// else.
type exec struct {
	container *container
	process   *libcontainer.Process
	pid       int
	sub       string      // name of the cgroup, "" if none could be made
	killed    atomic.Bool // with all that it started
	exited    chan struct{}
	code      int32       // set before exited is closed
	expire    *time.Timer // ends an exec that nobody waits for; nil for execSync

	mu       sync.Mutex
	stdin    *os.File            // write end or master; nil without or when closed
	terminal *os.File            // master; nil without
	outputs  map[string]*os.File // read ends that no pump has taken
	pumps    []*pump
}

// execCount names the cgroups of execs; unique in this shim.
var execCount atomic.Uint64

// startExec starts a process in a running container. The caller takes its
// outputs and ends it with release.
func (c *container) startExec(encoded []byte, stdin bool) (*exec, error) {
	spec := new(specs.Process)
	if err := json.Unmarshal(encoded, spec); err != nil {
		return nil, fmt.Errorf("exec in container %s: %w: %w", c.record.ID, errdefs.ErrInvalidArgument, err)
	}
	if status := c.state().Status; status != api.Status_STATUS_RUNNING {
		return nil, fmt.Errorf("exec in container %s: it is %v: %w", c.record.ID, status, errdefs.ErrFailedPrecondition)
	}
	process, err := newProcess(spec)
	if err != nil {
		return nil, fmt.Errorf("exec in container %s: %w", c.record.ID, err)
	}
	e := &exec{container: c, process: process, exited: make(chan struct{}), outputs: map[string]*os.File{}}
	e.makeCgroup()
	if err := e.launch(spec.Terminal, stdin); err != nil {
		e.closeStreams()
		e.removeCgroup()
		return nil, fmt.Errorf("exec in container %s: %w", c.record.ID, err)
	}
	go e.await()
	return e, nil
}

func (e *exec) launch(terminal, stdin bool) error {
	var childEnds []*os.File
	if !terminal {
		var err error
		childEnds, err = e.openPipes(stdin)
		defer func() { closeAll(childEnds) }()
		if err != nil {
			return err
		}
	}
	master, err := e.container.sup.startProcess(e.container.lib, e.process, terminal)
	if err != nil {
		return err
	}
	if terminal {
		e.stdin, e.terminal, e.outputs[api.Stdout] = master, master, master
	}
	e.pid, err = e.process.Pid()
	return err
}

func (e *exec) openPipes(stdin bool) (childEnds []*os.File, err error) {
	out := map[string]*os.File{}
	for _, stream := range []string{api.Stdout, api.Stderr} {
		read, write, err := os.Pipe()
		if err != nil {
			return childEnds, err
		}
		e.outputs[stream], out[stream] = read, write
		childEnds = append(childEnds, write)
	}
	e.process.Stdout, e.process.Stderr = out[api.Stdout], out[api.Stderr]
	if !stdin {
		return childEnds, nil
	}
	read, write, err := os.Pipe()
	if err != nil {
		return childEnds, err
	}
	e.process.Stdin, e.stdin = read, write
	return append(childEnds, read), nil
}

// await waits for the process, our child.
func (e *exec) await() {
	state, _ := e.process.Wait() // a bad exit is an error too; state says all
	e.container.sup.reaper.disown(e.pid)
	status, known := waitStatus(state)
	e.code = exitCode(status)
	if !known {
		e.code = unknownExitCode
	}
	e.mu.Lock()
	for _, p := range e.pumps {
		p.finish()
	}
	e.mu.Unlock()
	close(e.exited)
}

// take starts a pump on an output that nobody has taken yet.
func (e *exec) take(stream string, emit func([]byte)) (*pump, error) {
	e.mu.Lock()
	defer e.mu.Unlock()
	source := e.outputs[stream]
	if source == nil {
		return nil, fmt.Errorf("stream %s: %w", stream, errdefs.ErrNotFound)
	}
	delete(e.outputs, stream)
	p := newPump(source, emit)
	e.pumps = append(e.pumps, p)
	select {
	case <-e.exited:
		p.finish()
	default:
	}
	go p.run()
	return p, nil
}

// awaitOutput returns when all that the process wrote is delivered.
func (e *exec) awaitOutput() {
	e.mu.Lock()
	pumps := e.pumps
	e.mu.Unlock()
	for _, p := range pumps {
		<-p.done
	}
}

// release closes what is open; call it once the process has ended.
func (e *exec) release() {
	e.closeStreams()
	e.removeCgroup()
}

func (e *exec) closeStreams() {
	e.closeStdin()
	e.mu.Lock()
	defer e.mu.Unlock()
	for _, source := range e.outputs {
		_ = source.Close()
	}
	for _, p := range e.pumps {
		_ = p.source.Close()
	}
}

func (e *exec) closeStdin() {
	e.mu.Lock()
	defer e.mu.Unlock()
	if e.stdin != nil && e.stdin != e.terminal {
		_ = e.stdin.Close()
	}
	e.stdin = nil
}

// makeCgroup makes a child of the container's cgroup. Where that is refused,
// for example because the container has delegated its controllers, the exec
// runs in the container's own, and only its first process can be ended.
func (e *exec) makeCgroup() {
	controller, path, ok := tracker(e.container.snapshot().Cgroups)
	if !ok {
		return
	}
	sub := "minicri-exec-" + strconv.FormatUint(execCount.Add(1), 10) + "-" + strconv.Itoa(os.Getpid())
	if err := os.Mkdir(filepath.Join(path, sub), 0o755); err != nil {
		return
	}
	e.sub, e.process.SubCgroupPaths = sub, map[string]string{controller: sub}
}

// removeCgroup removes the exec's cgroup, and those of earlier execs whose
// background children have ended since.
func (e *exec) removeCgroup() {
	_, path, ok := tracker(e.container.snapshot().Cgroups)
	if !ok || e.sub == "" {
		return
	}
	c := e.container
	c.mu.Lock()
	earlier := c.leftover
	c.leftover = nil
	c.mu.Unlock()
	var left []string
	for _, sub := range earlier {
		if !removeCgroup(filepath.Join(path, sub), false) {
			left = append(left, sub)
		}
	}
	if !removeCgroup(filepath.Join(path, e.sub), e.killed.Load()) {
		left = append(left, e.sub)
	}
	c.mu.Lock()
	c.leftover = append(c.leftover, left...)
	c.mu.Unlock()
}

// killTree ends the process and everything that it started.
func (e *exec) killTree() error {
	e.killed.Store(true)
	err := e.process.Signal(syscall.SIGKILL)
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	if e.sub != "" {
		err = errors.Join(err, killCgroup(e.container.snapshot().Cgroups, e.sub, syscall.SIGKILL))
	}
	return err
}
