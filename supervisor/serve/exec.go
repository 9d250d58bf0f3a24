package serve

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"net"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/cgroups"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/bundle"
	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/supervisor/pipe"
	"github.com/minicri/minicri/supervisor/starter"
	"github.com/minicri/minicri/supervisor/stdio"
)

// exec is a further process of a container. It ends with the connection of its client.
type exec struct {
	container *container
	proc      *proc
	cgroup    *execCgroup // nil: it is in the container's cgroup
	note      string      // the file by which a successor finds and ends it; "" if that is the cgroup's
	slave     *os.File    // see pipe.OpenSlave; nil without a terminal
	exited    chan struct{}
	code      int32 // set before exited is closed
}

// serveExec starts a process and answers for it (package api).
func (s *Supervisor) serveExec(conn *net.UnixConn) {
	defer conn.Close()
	_ = conn.SetDeadline(time.Now().Add(requestLimit))
	var request api.ExecRequest
	files, _, err := socket.ReceiveMessage(conn, &request)
	_ = conn.SetDeadline(time.Time{})
	ctx, leave := context.WithCancel(context.Background())
	defer leave()
	over := make(chan bool, 1) // false: all that the process has started is to end
	go func() {                // ends with the connection
		n, _ := conn.Read(make([]byte, 1))
		over <- n > 0
		if n == 0 {
			leave()
		}
	}()
	var e *exec
	if err == nil {
		e, err = s.startExec(ctx, &request, files)
	}
	socket.CloseAll(files...)
	if err != nil {
		_ = socket.SendMessage(conn, refusal(err)) // its client may have left
		return
	}
	defer e.release()
	var master []*os.File
	if e.proc.terminal != nil {
		master = append(master, e.proc.terminal)
	}
	_ = socket.SendMessage(conn, api.ExecAnswer{}, master...)
	socket.CloseAll(master...) // the client has the only one: it hangs up by closing that
	select {
	case <-e.exited:
		_ = json.NewEncoder(conn).Encode(api.ExecAnswer{ExitCode: e.code})
		if !<-over {
			e.killTree()
		}
	case <-ctx.Done():
		e.killTree()
		select {
		case <-e.exited:
			_ = json.NewEncoder(conn).Encode(api.ExecAnswer{ExitCode: e.code})
		case <-time.After(process.KillLimit): // D state: it ends when it can, and is reaped then
		}
	}
}

// refusal is the answer for a process that was not started.
func refusal(err error) api.ExecAnswer {
	code, text := statusOf(err)
	return api.ExecAnswer{Error: text, Kind: uint32(code)}
}

func (s *Supervisor) startExec(ctx context.Context, request *api.ExecRequest, files []*os.File) (*exec, error) {
	c, err := s.find(request.Container)
	if err != nil {
		return nil, err
	}
	if request.Process == nil || !request.Process.Terminal && len(files) != len(stdio.Ends{}) {
		return nil, fmt.Errorf("exec in container %s: a process and its streams are required: %w", c.record.ID, errdefs.ErrInvalidArgument)
	}
	if status := c.state().Status; status != api.Status_STATUS_RUNNING && status != api.Status_STATUS_CREATED {
		return nil, fmt.Errorf("it does not run: %w", errdefs.ErrFailedPrecondition)
	}
	if c.record.Cgroups.Frozen() {
		return nil, fmt.Errorf("container %s is frozen, and no process can be started in it: thaw its cgroup: %w",
			c.record.ID, errdefs.ErrFailedPrecondition)
	}
	ctx, done := c.bound(ctx)
	defer done()
	e := &exec{container: c, exited: make(chan struct{})}
	if request.Apart && (len(c.record.Runtime) == 0 || c.record.ExecCgroups == starter.ExecCgroupByName ||
		c.record.ExecCgroups == starter.ExecCgroupByPath && c.record.Cgroups[""] != "") {
		e.cgroup = c.newExecCgroup()
	}
	var ends stdio.Ends
	copy(ends[:], files)
	if err := e.start(ctx, request, ends); err != nil {
		_ = os.RemoveAll(e.note)
		err = errors.Join(err, e.cgroup.kill(), e.cgroup.close())
		if exiting, _ := c.init.exiting(); exiting {
			err = fmt.Errorf("it ended while the command was being started: %w: %w", errdefs.ErrFailedPrecondition, err)
		}
		return nil, err
	}
	if e.proc.terminal != nil {
		e.slave = pipe.OpenSlave(e.proc.terminal)
	}
	go func() {
		e.code = exitCode(e.proc.wait())
		socket.CloseAll(e.slave)
		close(e.exited)
	}()
	return e, nil
}

// start launches the process directly, or by a starter if a launch cannot.
func (e *exec) start(ctx context.Context, request *api.ExecRequest, ends stdio.Ends) (err error) {
	c := e.container
	if len(c.record.Runtime) == 0 {
		template, err := c.execTemplate()
		if err != nil {
			return err
		}
		if template.CanExec(request.Process) {
			if c.init.gone() {
				return os.ErrProcessDone
			}
			made, err := c.sup.launcher.Exec(ctx, launch.Exec{
				Template: template, ID: c.record.ID, Init: c.init.found, Process: request.Process, Streams: ends,
				Cgroups: e.cgroups(), Made: e.keep,
			})
			if err == nil {
				e.proc = procOf(made)
			}
			return err
		}
	}
	asked := c.request(starter.Exec)
	asked.Terminal, asked.Process = request.Process.Terminal, request.Process
	if e.cgroup != nil {
		controller, _, _ := c.record.Cgroups.Tracker()
		asked.ExecCgroup = starter.ExecCgroup{Controller: controller, Sub: e.cgroup.sub, Form: c.record.ExecCgroups}
	}
	e.proc, _, err = c.startByStarter(ctx, asked, ends, nil, e.keep)
	return err
}

// execTemplate reads the container's spec once.
func (c *container) execTemplate() (*launch.Template, error) {
	c.mu.Lock()
	template := c.template
	c.mu.Unlock()
	if template != nil {
		return template, nil
	}
	spec, err := bundle.ReadSpec(c.record.Bundle)
	if err != nil {
		return nil, err
	}
	if template, err = c.sup.launcher.Template(spec); err != nil {
		return nil, err
	}
	c.mu.Lock()
	c.template = template
	c.mu.Unlock()
	return template, nil
}

// execNotePrefix begins the names of notes of execs in the container's cgroup: PID.STARTTIME follows.
const execNotePrefix = "exec-"

// keep notes a process before its program is executed, so that a successor can end it.
func (e *exec) keep(made process.Facts) error {
	if e.cgroup != nil {
		return nil // its cgroup has a note
	}
	e.note = filepath.Join(e.container.record.Dir(), fmt.Sprintf("%s%d.%d", execNotePrefix, made.PID, made.StartTime))
	return os.WriteFile(e.note, nil, 0o600)
}

// cgroups are the container's, one of them replaced by the exec's own.
func (e *exec) cgroups() bundle.Cgroups {
	own := e.container.record.Cgroups
	controller, path, _ := own.Tracker()
	instead := path
	if e.cgroup != nil {
		instead = filepath.Join(path, e.cgroup.sub)
	} else if controller == "" {
		instead = inhabited(path, e.container.init.PID)
	}
	if instead != path {
		own = maps.Clone(own)
		own[controller] = instead
	}
	return own
}

// inhabited returns the cgroup of version 2 that an exec enters. A cgroup that gives its controllers to cgroups below it
// takes no process (cgroups(7)): systemd in a container makes that of its container's. Then the exec enters the cgroup of
// the first process, if it is below.
func inhabited(path string, init int) string {
	given, err := os.ReadFile(filepath.Join(path, "cgroup.subtree_control"))
	if err != nil || len(bytes.TrimSpace(given)) == 0 {
		return path
	}
	now, _ := cgroups.ParseCgroupFile(fmt.Sprintf("/proc/%d/cgroup", init))
	for above := now[""]; len(above) > 1; above = filepath.Dir(above) {
		if strings.HasSuffix(path, above) {
			return path + strings.TrimPrefix(now[""], above)
		}
	}
	return path
}

// killTree ends the process with all that it has started: in its cgroup, else those that it or a descendant is the
// parent of.
func (e *exec) killTree() {
	if e.cgroup == nil && !isClosed(e.exited) {
		process.KillTree(e.proc.PID)
	}
	_ = e.proc.signal(syscall.SIGKILL) // an AppArmor profile may refuse it, which cgroup.kill does not ask
	if err := e.cgroup.kill(); err != nil {
		e.container.sup.log.Warn("a command that was to end may still run", "container", e.container.record.ID, "error", err)
	}
}

// release forgets the exec once the process is reaped, which may take long in D state.
func (e *exec) release() {
	closing := func() {
		<-e.exited
		_, _ = e.cgroup.close(), e.proc.close()
		_ = os.RemoveAll(e.note)
	}
	if isClosed(e.exited) {
		closing()
	} else {
		go closing()
	}
}

// execCgroup is a cgroup below a container's. The supervisor can end an exec in it with all of its descendants.
// The next exec uses it again. Calls on nil do nothing.
type execCgroup struct {
	container *container
	slot      int
	sub       string // its name
	note      string // the file that exists as long as a client waits for the exec

	mu     sync.Mutex // a closed one must not be killed: another exec may have it
	closed bool
}

// execCgroupPrefix begins the names; the number and the container's id follow, for agents that read the last element of a
// path. cAdvisor ignores cgroups that end in .mount: it would take each for a container.
const execCgroupPrefix, execCgroupSuffix = "minicri-exec-", ".mount"

// execCgroupAt returns the cgroup with a number, which may not exist.
func (c *container) execCgroupAt(slot int) *execCgroup {
	sub := execCgroupPrefix + strconv.Itoa(slot) + "-" + c.record.ID + execCgroupSuffix
	return &execCgroup{container: c, slot: slot, sub: sub, note: filepath.Join(c.record.Dir(), sub)}
}

const maxSlots = 1024 // no container has so many execs with something in the background

// newExecCgroup makes a child of the container's cgroup, or takes one that is empty. It returns nil if that is refused, or
// takes no process because the container has made another one threaded: then only the exec and its descendants can be
// ended.
func (c *container) newExecCgroup() *execCgroup {
	_, path, ok := c.record.Cgroups.Tracker()
	if !ok {
		return nil
	}
	for slot := c.takeSlot(true); slot < maxSlots; slot = c.takeSlot(false) {
		g := c.execCgroupAt(slot)
		// The note comes before the cgroup: a successor kills what is in a cgroup that has one.
		err := os.WriteFile(g.note, nil, 0o600)
		if made := os.Mkdir(filepath.Join(path, g.sub), 0o755); !errors.Is(made, fs.ErrExist) {
			err = errors.Join(err, made)
		}
		kind, _ := os.ReadFile(filepath.Join(path, g.sub, "cgroup.type")) // of version 2
		if err != nil || strings.Contains(string(kind), "invalid") {
			_ = os.Remove(g.note)
			c.endSlot(slot, false)
			return nil
		}
		if g.isEmpty() {
			return g
		}
		_ = os.Remove(g.note) // an earlier exec has left something in the background
		c.endSlot(slot, true)
	}
	return nil
}

// takeSlot takes the lowest number that is not taken, or maxSlots if there is none. To retry takes one, the next in turn, of
// those that an exec has left something in: it may have ended meanwhile. An exec does not try all of them.
func (c *container) takeSlot(retry bool) int {
	c.mu.Lock()
	defer c.mu.Unlock()
	for i := range maxSlots {
		next := (c.retried + 1 + i) % maxSlots
		if used, taken := c.slots[next]; retry && taken && !used {
			c.retried, c.slots[next] = next, true
			return next
		}
	}
	for slot := range maxSlots {
		if _, taken := c.slots[slot]; !taken {
			c.slots[slot] = true
			return slot
		}
	}
	return maxSlots
}

// endSlot frees a number, unless something is left in its cgroup.
func (c *container) endSlot(slot int, isLeft bool) {
	c.mu.Lock()
	defer c.mu.Unlock()
	if delete(c.slots, slot); isLeft {
		c.slots[slot] = false
	}
}

// isEmpty reports whether no process is in the cgroup, or in one that an exec has made below it.
func (g *execCgroup) isEmpty() bool {
	_, path, _ := g.container.record.Cgroups.Tracker()
	pids, err := cgroups.GetAllPids(filepath.Join(path, g.sub))
	return len(pids) == 0 && (err == nil || errors.Is(err, fs.ErrNotExist))
}

func (g *execCgroup) kill() error {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil
	}
	return g.container.record.Cgroups.Signal(g.sub, syscall.SIGKILL)
}

// close gives the cgroup to another exec, unless this one left a process in it. It can be repeated.
func (g *execCgroup) close() error {
	if g == nil {
		return nil
	}
	g.mu.Lock()
	defer g.mu.Unlock()
	if g.closed {
		return nil
	}
	g.closed = true
	err := os.RemoveAll(g.note)
	g.container.endSlot(g.slot, !g.isEmpty())
	return err
}

// leftExec is an exec of an earlier supervisor, by its note.
type leftExec struct {
	note   string
	proc   process.Facts // empty for one in a cgroup of its own
	cgroup string        // its name
	slot   int
}

// leftExecs returns the execs of an earlier supervisor. The names of their cgroups are in use until they are ended.
func (c *container) leftExecs() (left []leftExec, err error) {
	notes, err := os.ReadDir(c.record.Dir())
	if errors.Is(err, os.ErrNotExist) {
		return nil, nil
	}
	for _, note := range notes {
		one := leftExec{note: filepath.Join(c.record.Dir(), note.Name())}
		if number, is := strings.CutPrefix(note.Name(), execCgroupPrefix); is {
			number, _, _ = strings.Cut(number, "-") // builds of protocol 2 have only the number
			if one.slot, err = strconv.Atoi(number); err == nil {
				one.cgroup, c.slots[one.slot] = note.Name(), true
				left = append(left, one)
			}
		} else if text, is := strings.CutPrefix(note.Name(), execNotePrefix); is {
			if n, _ := fmt.Sscanf(text, "%d.%d", &one.proc.PID, &one.proc.StartTime); n == 2 {
				left = append(left, one)
			}
		}
	}
	return left, nil
}

// endLeftExecs kills these execs. What ended execs left in the background runs on: those have no note.
func (c *container) endLeftExecs(left []leftExec) {
	for _, one := range left {
		if err := c.endLeftExec(one); err != nil && !isClosed(c.exited) {
			c.sup.log.Warn("an exec that no client waits for may still run", "container", c.record.ID, "error", err)
		}
	}
}

func (c *container) endLeftExec(one leftExec) (err error) {
	if one.cgroup != "" {
		err = c.record.Cgroups.Signal(one.cgroup, syscall.SIGKILL)
		c.endSlot(one.slot, true) // the next exec looks whether it is empty
	} else if found, findErr := process.Open(one.proc); findErr == nil {
		process.KillTree(one.proc.PID)
		err = found.Close()
	}
	return errors.Join(err, os.RemoveAll(one.note))
}
