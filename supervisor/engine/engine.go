// Package engine does a starter's work: it creates (up to the exec barrier), starts, updates and deletes
// a container, or starts a process in one, with libcontainer or by a runtime, a program with runc's command line.
// Only it and the shim's main import libcontainer; [Main] runs in `minicri-shim start`, never in the supervisor.
//
// A process makes one call only, so nothing here has a lock or a way to be aborted, and only hooks and the wait
// for a terminal have a limit of their own: the supervisor ends a starter with all that it has started (package starter).
//
// What a runtime says of processes and cgroups is checked before the supervisor may kill by it (runtime.go).
package engine

import (
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"os/signal"
	"path/filepath"
	"runtime"
	"runtime/debug"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	_ "github.com/opencontainers/cgroups/devices" // without it libcontainer cannot apply device rules
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runc/libcontainer/specconv"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/internal/step/failpoint"
	"github.com/minicri/minicri/supervisor/bundle"
	"github.com/minicri/minicri/supervisor/launch"
	"github.com/minicri/minicri/supervisor/starter"
)

// Main serves a starter's one request. The process of an exec is a child of this thread, which ends with the starter.
func Main() error {
	runtime.LockOSThread()
	return serve(do)
}

// serve waits for the request, does it, answers, and returns when the supervisor has taken over what was
// made. If the supervisor has ended, it ends what it starts meanwhile, or calls undo.
func serve(do func(request starter.Request, files []*os.File) (answer starter.Answer, undo func() error, err error)) error {
	if err := process.Adopt(); err != nil {
		return err
	}
	// When the supervisor ends, the kernel sends SIGHUP to the groups of starters that have stopped children, which these
	// starters have to kill. It is caught, as what they execute would ignore it, too.
	signal.Notify(make(chan os.Signal, 1), unix.SIGHUP)
	supervisor, request, files, err := receive()
	if errors.Is(err, io.EOF) {
		return nil // it is not needed
	}
	if err != nil {
		return err
	}
	if err := failpoint.Hit("starter/asked"); err != nil {
		return err
	}
	var killing sync.Mutex // guards did: what has been made is undo's to end
	did, word := false, make(chan error, 1)
	go func() {
		_, err := io.ReadFull(supervisor, make([]byte, len(starter.Taken)))
		// A container may hold up what was started, and nobody else would end it.
		for over := err == nil || request.Verb != starter.Create && request.Verb != starter.Exec; !over; time.Sleep(killPause) {
			killing.Lock()
			if over = did; !over {
				killChildren()
			}
			killing.Unlock()
		}
		word <- err
	}()
	answer, undo, failed := do(request, files)
	killing.Lock()
	did = true
	killing.Unlock()
	socket.CloseAll(files...)
	if failed != nil {
		process.AwaitKilled(func() (none bool) { killChildren(); return !hasChildren() })
		answer = starter.Answer{Error: failed.Error(), Kind: errdefs.Resolve(failed).Error()}
	}
	if err = failpoint.Hit("starter/made"); err == nil {
		err = socket.SendMessage(supervisor, answer)
	}
	if err == nil {
		err = failpoint.Hit("starter/answered")
	}
	if err == nil && failed == nil {
		err = <-word
	}
	if err != nil && undo != nil {
		return errors.Join(err, undo())
	}
	if err == nil && request.Verb == starter.Exec && answer.PID > 0 {
		outlive(supervisor, answer.PID)
	}
	return err
}

// receive waits for the request.
func receive() (supervisor *net.UnixConn, request starter.Request, files []*os.File, err error) {
	unix.CloseOnExec(starter.Socket)
	if supervisor, err = socket.Conn(os.NewFile(starter.Socket, "socket")); err != nil {
		return nil, request, nil, fmt.Errorf("open the socket of a starter: %w", err)
	}
	if files, _, err = socket.ReceiveMessage(supervisor, &request); err != nil {
		return nil, request, files, fmt.Errorf("read the request of a starter: %w", err)
	}
	return supervisor, request, files, nil
}

// outlive returns when a process has ended, and leaves it to the supervisor to reap: see package starter. Orphans of the
// container go to the supervisor at once.
func outlive(supervisor io.Closer, pid int) {
	_ = supervisor.Close()
	_ = unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)
	debug.FreeOSMemory()
	for unix.Waitid(unix.P_PID, pid, nil, unix.WEXITED|unix.WNOWAIT, nil) == unix.EINTR {
	}
}

// killChildren kills what this process, a sub-reaper, has started. It may miss what is made meanwhile, or listed while
// others end (proc_pid_task_children(5)).
func killChildren() {
	for _, child := range process.Children("self") {
		process.KillTree(child)
	}
}

// hasChildren reaps what has ended, and reports whether any is left.
func hasChildren() bool {
	for {
		pid, err := unix.Wait4(-1, nil, unix.WNOHANG, nil)
		if pid == 0 && err == nil || errors.Is(err, unix.ECHILD) {
			return err == nil
		}
	}
}

func do(r starter.Request, files []*os.File) (answer starter.Answer, undo func() error, err error) {
	var given streams
	for i, is := range r.Streams {
		if is && len(files) > 0 {
			given.stdio[i], files = files[0], files[1:]
		}
	}
	if r.Terminal && len(files) > 0 {
		given.console = files[0]
	}
	var c container = &libContainer{Request: r}
	if len(r.Runtime) > 0 {
		c = &runtimeContainer{Request: r}
	}
	switch r.Verb {
	case starter.Create:
		spec, err := bundle.ReadSpec(r.Bundle)
		if err != nil {
			return answer, nil, fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
		}
		answer, err = c.create(spec, given)
		return answer, c.delete, err
	case starter.Exec:
		answer.PID, err = c.exec(given)
		return answer, func() error { return killProcess(answer.PID) }, err
	case starter.Start:
		return answer, nil, c.start()
	case starter.Update:
		return answer, nil, update(r, c)
	case starter.Delete:
		return answer, nil, c.delete()
	}
	return answer, nil, fmt.Errorf("verb %q: %w", r.Verb, errdefs.ErrInvalidArgument)
}

// container is a container of libcontainer or of a runtime. After an error exec leaves nothing; what create leaves,
// the runtime's container excepted, the supervisor removes.
type container interface {
	create(spec *specs.Spec, given streams) (starter.Answer, error)
	exec(given streams) (pid int, err error)
	start() error
	// setResources may have set a part after an error.
	setResources(wanted *specs.LinuxResources, oomScoreAdj *int) error
	delete() error
}

// streams are a process's standard streams. Nil ones are /dev/null, for an init the container's; an exec would
// get the node's, so it has all three. With a terminal all are nil, and its master is sent over console.
type streams struct {
	stdio   [3]*os.File
	console *os.File
}

// setOn sets the streams that are not nil.
func (s *streams) setOn(stdin *io.Reader, stdout, stderr *io.Writer) {
	if file := s.stdio[0]; file != nil {
		*stdin = file
	}
	if file := s.stdio[1]; file != nil {
		*stdout = file
	}
	if file := s.stdio[2]; file != nil {
		*stderr = file
	}
}

func killProcess(pid int) error {
	if pid > 0 {
		_ = unix.Kill(pid, unix.SIGKILL) // not reaped yet, so the pid is not reused
	}
	return nil
}

type libContainer struct{ starter.Request }

func (c *libContainer) create(spec *specs.Spec, given streams) (answer starter.Answer, err error) {
	process, err := newProcess(spec.Process)
	if err != nil {
		return answer, err
	}
	process.Init = true
	// libcontainer tells hooks that its working directory is the bundle.
	if err := os.Chdir(c.Bundle); err != nil {
		return answer, err
	}
	config, err := specconv.CreateLibcontainerConfig(&specconv.CreateOpts{
		CgroupName: c.ID, UseSystemdCgroup: c.SystemdCgroup, NoNewKeyring: !launch.MakeSessionKeyring(c.ID, spec.Process.SelinuxLabel), Spec: spec,
	})
	if err != nil {
		return answer, fmt.Errorf("translate the specification: %w", err)
	}
	// libcontainer runs these against the specification: poststart while init waits at the barrier, and poststop
	// where errors make Destroy fail. runHooks does.
	delete(config.Hooks, configs.Poststart)
	delete(config.Hooks, configs.Poststop)
	for _, list := range config.Hooks {
		for _, hook := range list {
			if command, ok := hook.(configs.CommandHook); ok && command.Timeout == nil {
				command.Timeout = new(hookLimit)
			}
		}
	}
	lib, err := libcontainer.Create(c.Root, c.ID, config)
	if err != nil {
		return answer, err
	}
	if answer.PID, err = startIn(lib, process, given); err != nil {
		if _, pidErr := process.Pid(); pidErr == nil { // it ran: the container lacks what it asks for
			err = fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
		}
		return answer, err
	}
	state, err := lib.State()
	if err != nil {
		return answer, fmt.Errorf("find the cgroups of container %s: %w", c.ID, err)
	}
	answer.Cgroups = state.CgroupPaths
	return answer, nil
}

// startIn starts an init or an exec, and returns its pid.
func startIn(lib *libcontainer.Container, process *libcontainer.Process, given streams) (int, error) {
	if err := giveStreams(lib, process, given.stdio); err != nil {
		return 0, err
	}
	given.setOn(&process.Stdin, &process.Stdout, &process.Stderr)
	process.ConsoleSocket = given.console
	if err := lib.Start(process); err != nil {
		return 0, err
	}
	return process.Pid()
}

// giveStreams makes the user of a user namespace the streams' owner, so that it can open them again by
// their names in /proc/self/fd, as /dev/stdout is one. libcontainer does this for other users.
func giveStreams(lib *libcontainer.Container, process *libcontainer.Process, stdio [3]*os.File) error {
	config := lib.Config()
	if !config.Namespaces.Contains(configs.NEWUSER) {
		return nil
	}
	uid, err := config.HostUID(process.UID)
	gid, e := config.HostGID(process.GID)
	err = errors.Join(err, e)
	for _, stream := range stdio {
		if stream != nil && err == nil {
			err = stream.Chown(uid, gid)
		}
	}
	if err != nil {
		return fmt.Errorf("change the owner of the streams: %w", err)
	}
	return nil
}

// load loads the container. libcontainer takes one whose init's first thread has ended for stopped, and looks for the
// namespaces of that thread. Its state then gets another thread, which it cannot tell from a process.
func (c *libContainer) load() (lib *libcontainer.Container, err error) {
	defer func() {
		if err != nil {
			err = fmt.Errorf("load container %s: %w", c.ID, err)
		}
	}()
	if lib, err = libcontainer.Load(c.Root, c.ID); err != nil {
		return nil, err
	}
	state, err := lib.State()
	if err != nil {
		return nil, err
	}
	live, err := process.LiveThread(state.InitProcessPid)
	if err != nil || live == state.InitProcessPid {
		return lib, nil // libcontainer says what is wrong
	}
	stat, err := process.ReadStat(live)
	if err != nil {
		return nil, err
	}
	state.InitProcessPid, state.InitProcessStartTime = live, stat.StartTime
	if err := bundle.WriteJSON(filepath.Join(c.Dir(), "state.json"), state); err != nil {
		return nil, err
	}
	return libcontainer.Load(c.Root, c.ID)
}

func (c *libContainer) exec(given streams) (int, error) {
	process, err := newProcess(c.Process)
	if err != nil {
		return 0, err
	}
	lib, err := c.load()
	if err != nil {
		return 0, err
	}
	if c.ExecCgroup.Sub != "" {
		process.SubCgroupPaths = map[string]string{c.ExecCgroup.Controller: c.ExecCgroup.Sub}
	}
	return startIn(lib, process, given)
}

// start runs the poststart hooks.
func (c *libContainer) start() error {
	spec, err := bundle.ReadSpec(c.Bundle)
	if err != nil || spec.Hooks == nil {
		return err
	}
	return c.runHooks("poststart", spec.Hooks.Poststart, specs.State{Status: specs.StateRunning, Pid: c.InitPID, Annotations: spec.Annotations})
}

// delete removes a container, even one that was made in part, and then runs the poststop hooks. Their errors
// are of the kind ErrFailedPrecondition: they do not keep the container (runtime-spec, Lifecycle).
func (c *libContainer) delete() error {
	spec, err := bundle.ReadSpec(c.Bundle)
	if err := c.Remove(); err != nil {
		return err
	}
	if err != nil || spec.Hooks == nil { // never made, or without any
		return nil
	}
	err = c.runHooks("poststop", spec.Hooks.Poststop, specs.State{Status: specs.StateStopped, Annotations: spec.Annotations})
	if err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
	}
	return nil
}

// newProcess translates a process for libcontainer. The caller sets its streams and Init.
func newProcess(p *specs.Process) (*libcontainer.Process, error) {
	affinity, err := configs.ConvertCPUAffinity(p.ExecCPUAffinity)
	if err != nil {
		return nil, fmt.Errorf("parse the CPU affinity: %w", err)
	}
	process := &libcontainer.Process{
		Args: p.Args, Env: p.Env, Cwd: p.Cwd, UID: int(p.User.UID), GID: int(p.User.GID),
		Capabilities: (*configs.Capabilities)(p.Capabilities), NoNewPrivileges: &p.NoNewPrivileges,
		AppArmorProfile: p.ApparmorProfile, Label: p.SelinuxLabel,
		Scheduler: p.Scheduler, IOPriority: p.IOPriority, CPUAffinity: affinity,
		LogLevel: "3", // without the debug lines that init pipes to us: logrus.WarnLevel
	}
	for _, gid := range p.User.AdditionalGids {
		process.AdditionalGroups = append(process.AdditionalGroups, int(gid))
	}
	for _, limit := range p.Rlimits {
		kind, ok := launch.Rlimits[limit.Type]
		if !ok {
			return nil, fmt.Errorf("unknown rlimit %q", limit.Type)
		}
		process.Rlimits = append(process.Rlimits, configs.Rlimit{Type: int(kind), Hard: limit.Hard, Soft: limit.Soft})
	}
	if p.ConsoleSize != nil {
		process.ConsoleWidth = uint16(p.ConsoleSize.Width)
		process.ConsoleHeight = uint16(p.ConsoleSize.Height)
	}
	return process, nil
}

const (
	hookLimit   = 30 * time.Second      // for hooks that set no limit; processes that they leave end with the starter
	killPause   = 50 * time.Millisecond // between two looks for what is started after the supervisor's end
	outputLimit = time.Second           // for what a hook has left to close its output: Run waits for that
)

// runHooks runs all hooks, in spite of errors.
func (c *libContainer) runHooks(name string, hooks []specs.Hook, state specs.State) (err error) {
	state.Version, state.ID, state.Bundle = specs.Version, c.ID, c.Bundle
	for _, hook := range hooks {
		command := &configs.Command{Path: hook.Path, Args: hook.Args, Env: hook.Env, Timeout: new(hookLimit)}
		if hook.Timeout != nil {
			command.Timeout = new(time.Duration(*hook.Timeout) * time.Second)
		}
		late := time.AfterFunc(*command.Timeout+outputLimit, killChildren)
		if e := command.Run(&state); e != nil {
			err = errors.Join(err, fmt.Errorf("%s hook %s: %w", name, hook.Path, e))
		}
		late.Stop()
	}
	return err
}
