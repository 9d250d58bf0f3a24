package runtime

import (
	"context"
	"errors"
	"fmt"
	"log/slog"
	"maps"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/shim/stdio"
)

// Builtin is libcontainer in this process, which has to be the parent of all
// that it starts.
type Builtin struct {
	root          string // of libcontainer's states
	systemdCgroup bool
	noNewKeyring  bool
	children      *children
	filters       filters
	otherLibrary  func() string // findOtherLibrary, asked once

	mu       sync.Mutex // guards what follows
	creating map[string]creating
	launcher *os.File // the program of package launch; nil before its first use
	// emptyMounts is the mount namespace that launches copy; nil before its first use.
	emptyMounts *os.File
}

// NewBuiltin keeps the state of containers below root.
func NewBuiltin(root string, systemdCgroup bool) *Builtin {
	return &Builtin{root: root, systemdCgroup: systemdCgroup, noNewKeyring: !canJoinSessionKeyring(), children: newChildren(), otherLibrary: sync.OnceValue(findOtherLibrary), creating: make(map[string]creating)}
}

// Run reaps what was adopted, if this process does adopt (Command, Task), until
// ctx ends.
func (b *Builtin) Run(ctx context.Context) { b.children.run(ctx) }

// ReapRest has those children reaped that the build before, in this process, has
// left besides containers. Call it once, when all containers are found.
func (b *Builtin) ReapRest() { b.children.reapRest() }

// Features: everything.
func (*Builtin) Features() Features { return Features{ExecTrees: true, Adoption: true} }

// Create is of Runtime.
func (b *Builtin) Create(id, bundle string, spec *specs.Spec, streams Streams) (Container, *Process, error) {
	process, passed, err := processWithBytes(spec.Process, spec.Linux.MountLabel)
	if err != nil {
		return nil, nil, err
	}
	defer passed.Close()
	process.Init = true
	var config *configs.Config
	// A user namespace that is joined is looked at by a helper process.
	err = b.children.during(func() (err error) {
		config, err = toConfig(spec, id, b.systemdCgroup, b.noNewKeyring)
		return err
	})
	if err != nil {
		return nil, nil, err
	}
	nameBundle(config, bundle)
	hooks := takeHooks(config, id)
	lib, err := libcontainer.Create(b.root, id, config)
	if err != nil {
		return nil, nil, err
	}
	c := b.container(lib)
	c.hooks = hooks
	b.setCreating(id, config.Cgroups, nil)
	defer b.setCreating(id, nil, nil)
	init, err := c.startInit(config, process, streams)
	if err == nil {
		err = c.findCgroups()
	}
	if errors.Is(err, errStillRuns) {
		return nil, nil, errors.Join(err, b.Discard(id)) // its cgroups can be removed when it has ended
	}
	if err != nil {
		return nil, nil, errors.Join(initError(process, err), destroy(lib, process))
	}
	return c, init, nil
}

func (b *Builtin) container(lib *libcontainer.Container) *builtinContainer {
	return &builtinContainer{runtime: b, lib: lib, dir: filepath.Join(b.root, lib.ID())}
}

// initError is the error of a start that failed. Where init had begun to run,
// errdefs.ErrFailedPrecondition says that the container asks for what it does
// not have: a program, a directory, memory.
func initError(process *libcontainer.Process, err error) error {
	if _, pidErr := process.Pid(); pidErr != nil {
		return err // the machine's fault: nothing ran
	}
	return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition)
}

// Load is of Runtime.
func (b *Builtin) Load(id string) (Container, error) {
	lib, err := libcontainer.Load(b.root, id)
	if errors.Is(err, libcontainer.ErrNotExist) {
		return nil, fmt.Errorf("load container %s: %w: %w", id, errdefs.ErrNotFound, err)
	}
	if err != nil {
		return nil, fmt.Errorf("load container %s: %w", id, err)
	}
	c := b.container(lib)
	return c, errors.Join(c.findCgroups(), c.loadHooks())
}

// Adopted is a container that runs, by its cgroups alone: to load one reads two files,
// whose forms take a millisecond.
func (b *Builtin) Adopted(id string, cgroups map[string]string) Adopted {
	dir := filepath.Join(b.root, id)
	return &builtinContainer{runtime: b, dir: dir, cgroups: cgroups, execs: newExecCgroups(cgroups, dir)}
}

// Discard is of Runtime: there is no more than a directory.
func (b *Builtin) Discard(id string) error { return os.RemoveAll(filepath.Join(b.root, id)) }

// builtinContainer is a Container of libcontainer's.
type builtinContainer struct {
	runtime *Builtin
	lib     *libcontainer.Container
	dir     string            // libcontainer's state
	cgroups map[string]string // by controller, "" for version 2
	init    Init              // its first process
	hooks   configs.Hooks     // those that libcontainer does not run
	execs   *execCgroups
}

// findCgroups asks libcontainer once, for the first process too: its lock is held
// while an exec starts.
func (c *builtinContainer) findCgroups() error {
	state, err := c.lib.State()
	if err != nil {
		return fmt.Errorf("cgroups of container %s: %w", c.lib.ID(), err)
	}
	// A copy: Destroy of libcontainer takes out of its own what it has removed.
	c.cgroups = maps.Clone(state.CgroupPaths)
	c.execs = newExecCgroups(c.cgroups, c.dir)
	c.init = initOf(state)
	return nil
}

// giveStreams lets the process open its streams again by their names in
// /proc/self/fd, as /dev/stdout is one: in a user namespace their owner has to
// be an id of it. (libcontainer sees to all others.)
func (c *builtinContainer) giveStreams(process *libcontainer.Process, streams Streams) error {
	config := c.lib.Config()
	if !config.Namespaces.Contains(configs.NEWUSER) {
		return nil
	}
	uid, err := config.HostUID(process.UID)
	if err != nil {
		return fmt.Errorf("owner of the streams: %w", err)
	}
	gid, err := config.HostGID(process.GID)
	if err != nil {
		return fmt.Errorf("owner of the streams: %w", err)
	}
	for _, stream := range []*os.File{streams.Stdin, streams.Stdout, streams.Stderr} {
		if stream == nil {
			continue
		}
		if err := stream.Chown(uid, gid); err != nil {
			return fmt.Errorf("owner of the streams: %w", err)
		}
	}
	return nil
}

// start starts an init or an exec, as our child with an owner.
func (c *builtinContainer) start(process *libcontainer.Process, streams Streams, t *tree) (*Process, error) {
	if err := c.giveStreams(process, streams); err != nil {
		return nil, err
	}
	if streams.Stdin != nil {
		process.Stdin = streams.Stdin
	}
	if streams.Stdout != nil {
		process.Stdout = streams.Stdout
	}
	if streams.Stderr != nil {
		process.Stderr = streams.Stderr
	}
	var console *os.File
	if streams.Terminal {
		ours, inits, err := stdio.ConsolePair()
		if err != nil {
			return nil, err
		}
		defer ours.Close()
		defer inits.Close()
		process.ConsoleSocket, console = inits, ours
	}
	pid, err := c.runtime.children.own(func() (int, error) {
		if err := c.startLib(process); err != nil {
			return 0, err
		}
		return process.Pid()
	})
	if err != nil {
		return nil, err
	}
	p, err := openProcess(pid)
	if err == nil && console != nil {
		p.Terminal, err = stdio.ReceiveMaster(console)
	}
	if err != nil {
		c.runtime.children.lose(pid)
		return nil, err
	}
	p.tree = t
	p.reap = func() (syscall.WaitStatus, bool) {
		state, _ := process.Wait() // a bad exit is an error too; state says all
		c.runtime.children.disown(pid)
		return waitStatus(state)
	}
	return p, nil
}

func waitStatus(state *os.ProcessState) (status syscall.WaitStatus, known bool) {
	if state == nil {
		return 0, false
	}
	status, known = state.Sys().(syscall.WaitStatus)
	return status, known
}

// Start is of Container.
func (c *builtinContainer) Start() error { return c.lib.Exec() }

// Started is of Container.
func (c *builtinContainer) Started() error { return c.runHooks(configs.Poststart) }

// SignalAll is of Container.
func (c *builtinContainer) SignalAll(sig syscall.Signal) error { return killCgroup(c.cgroups, "", sig) }

// Cgroups is of Container.
func (c *builtinContainer) Cgroups() map[string]string { return c.cgroups }

// Clear is of Clearer. With version 1 there is a cgroup in each of a dozen hierarchies,
// for which Delete, and with it who removes the container, would wait. The one of
// version 2 stays: its OOM notices may still be read, and systemd is to see that
// its scope is empty.
func (c *builtinContainer) Clear() {
	if _, v1 := c.cgroups["memory"]; !v1 || c.lib.Config().Cgroups.Systemd {
		return
	}
	for _, path := range c.cgroups {
		_ = unix.Rmdir(path)
	}
}

// NotifyOOM is of Container.
func (c *builtinContainer) NotifyOOM() (<-chan struct{}, error) { return notifyOOM(c.cgroups) }

// deleteTimeout is how long killed processes may take to be gone.
const deleteTimeout = 3 * time.Second

// Delete is of Container. Processes may take a while to go, in D state for
// example.
func (c *builtinContainer) Delete() error {
	for deadline := time.Now().Add(deleteTimeout); ; {
		_ = killCgroup(c.cgroups, "", syscall.SIGKILL)
		err := c.lib.Destroy()
		if err == nil {
			return c.stopped()
		}
		if time.Now().After(deadline) {
			return err
		}
	}
}

// stopped runs the hooks that wait for the end. What fails there is a warning,
// and no reason to keep the container (runtime-spec, Lifecycle).
func (c *builtinContainer) stopped() error {
	if err := c.runHooks(configs.Poststop); err != nil {
		slog.Warn("a hook failed after the end", "container", c.lib.ID(), "error", err)
	}
	return nil
}
