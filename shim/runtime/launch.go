package runtime

import (
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/manager"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/shim/runtime/launch"
)

// The files of a container in libcontainer's state directory.
const (
	stateFile = "state.json"
	fifoFile  = "exec.fifo"
)

// launching is a start without libcontainer's init. All else is libcontainer's: the
// state, the cgroups and the barrier, so that a supervisor that adopts the process,
// also one of another build, finds a container of libcontainer's.
type launching struct {
	id, dir string
	config  *configs.Config
	process *libcontainer.Process
	streams Streams
	cgroups cgroups.Manager
	files   []*os.File // what the process gets: streams, socket, barrier, program
	pid     int        // 0 before it is started

	mu      sync.Mutex // guards what follows
	ours    net.Conn   // our end of the socket; nil before it is open
	aborted bool
}

// launch brings the process to the exec barrier, and makes c a container that
// libcontainer has loaded.
func (c *builtinContainer) launch(config *configs.Config, process *libcontainer.Process, streams Streams) (*Process, error) {
	l := &launching{id: c.lib.ID(), dir: c.dir, config: config, process: process, streams: streams}
	c.runtime.setCreating(l.id, config.Cgroups, l)
	var err error
	if l.cgroups, err = manager.New(config.Cgroups); err != nil {
		return nil, err
	}
	pid, err := c.runtime.children.own(func() (int, error) {
		err := c.runtime.start(l)
		return l.pid, err
	})
	if err != nil {
		return nil, err
	}
	p, err := openProcess(pid)
	if err == nil {
		c.lib, err = libcontainer.Load(c.runtime.root, l.id)
	}
	if err != nil {
		err = errors.Join(err, l.end())
		c.runtime.children.lose(pid)
		return nil, err
	}
	p.reap = func() (syscall.WaitStatus, bool) { return c.runtime.children.wait(pid) }
	return p, nil
}

// start starts the process and waits until it is at the barrier. After an error
// it has ended.
func (b *Builtin) start(l *launching) error {
	filter, err := b.filters.of(l.config.Seccomp)
	if err != nil {
		return err
	}
	ours, err := l.open(b)
	defer func() {
		for _, file := range l.files {
			_ = file.Close()
		}
	}()
	if err != nil {
		return err
	}
	defer ours.Close()
	if err := l.use(ours); err != nil {
		return err
	}
	list := &launchList{id: l.id, config: l.config, process: l.process, filter: filter}
	if list.cgroups, err = l.fork(); err != nil {
		return err
	}
	if err = list.fill(); err == nil {
		err = l.run(list, ours)
	}
	if err != nil {
		return errors.Join(fmt.Errorf("launch %s: %w", l.process.Args[0], err), l.end())
	}
	return nil
}

// run sends the list to the process, writes libcontainer's state while it works, and
// waits for the answer.
func (l *launching) run(list *launchList, ours net.Conn) error {
	if _, err := list.WriteTo(ours); err != nil {
		return fmt.Errorf("say what to do: %w", err)
	}
	// Closed here, so that there is an end to read when the process has ended.
	if err := l.files[launch.Socket].Close(); err != nil {
		return err
	}
	if err := l.save(); err != nil {
		return err
	}
	err := list.ReadAnswer(ours)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return l.late()
	case err != nil:
		return fmt.Errorf("%w: %w", err, errdefs.ErrFailedPrecondition) // as initError
	}
	return nil
}

// open opens what the process gets, and our end of the socket.
func (l *launching) open(b *Builtin) (net.Conn, error) {
	for number, given := range l.streams.files() {
		stream, err := copyOrNull(given, number)
		if err != nil {
			return nil, err
		}
		l.files = append(l.files, stream)
	}
	ours, theirs, err := socketPair()
	if err != nil {
		return nil, err
	}
	l.files = append(l.files, theirs)
	fifo, err := makeFIFO(filepath.Join(l.dir, fifoFile))
	if err != nil {
		return nil, errors.Join(err, ours.Close())
	}
	l.files = append(l.files, fifo)
	program, err := b.openLauncher()
	if err != nil {
		return nil, errors.Join(err, ours.Close())
	}
	l.files = append(l.files, program)
	return ours, nil
}

// openLauncher is the program of package launch, in memory since the first use.
func (b *Builtin) openLauncher() (*os.File, error) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if b.launcher == nil {
		elf, err := launch.Program()
		if err == nil {
			b.launcher, err = sealedFile(launch.Name, elf, unix.MFD_EXEC)
		}
		if err != nil {
			return nil, err
		}
	}
	fd, err := unix.FcntlInt(b.launcher.Fd(), unix.F_DUPFD_CLOEXEC, 0)
	if err != nil {
		return nil, os.NewSyscallError("fcntl", err)
	}
	return os.NewFile(uintptr(fd), launch.Name), nil
}

func socketPair() (ours net.Conn, theirs *os.File, err error) {
	fds, err := unix.Socketpair(unix.AF_UNIX, unix.SOCK_STREAM|unix.SOCK_CLOEXEC, 0)
	if err != nil {
		return nil, nil, os.NewSyscallError("socketpair", err)
	}
	file := os.NewFile(uintptr(fds[0]), "launch")
	defer file.Close()
	theirs = os.NewFile(uintptr(fds[1]), "launched")
	ours, err = net.FileConn(file)
	if err != nil {
		return nil, nil, errors.Join(err, theirs.Close())
	}
	return ours, theirs, nil
}

// makeFIFO makes the exec barrier as libcontainer has it: the user that the
// process runs as may write to it.
func makeFIFO(path string) (*os.File, error) {
	const mode = 0o622
	if err := unix.Mkfifo(path, mode); err != nil {
		return nil, fmt.Errorf("make the exec barrier: %w", err)
	}
	if err := os.Chmod(path, mode); err != nil { // the umask
		return nil, err
	}
	return os.OpenFile(path, unix.O_PATH|unix.O_CLOEXEC, 0)
}

// fork makes the cgroups and starts the process, which waits for its list, in the
// namespaces that are new. It returns the cgroups that the process has to enter by
// itself.
func (l *launching) fork() (enter map[string]string, err error) {
	if l.config.Cgroups.Systemd {
		return nil, l.forkAndMove()
	}
	const noProcess = -1 // the cgroups are made, and nothing is moved
	if err := l.setCgroups(noProcess); err != nil {
		return nil, err
	}
	enter = maps.Clone(l.cgroups.GetPaths())
	unified, ok := enter[""]
	if !ok {
		return enter, l.exec(nil)
	}
	delete(enter, "")
	dir, err := os.OpenFile(unified, unix.O_PATH|unix.O_DIRECTORY, 0)
	if err != nil {
		return nil, err
	}
	defer dir.Close()
	if err = l.exec(dir); refusesClone3(err) {
		return nil, l.forkAndMove()
	}
	return enter, err
}

// refusesClone3 reports whether a process cannot be made in a cgroup: an outer
// container's filter may not know clone3(2).
func refusesClone3(err error) bool {
	return errors.Is(err, unix.ENOSYS) || errors.Is(err, unix.EPERM)
}

// forkAndMove is fork for cgroups that a process has to be moved into.
func (l *launching) forkAndMove() error {
	if err := l.exec(nil); err != nil {
		return err
	}
	if err := l.setCgroups(l.pid); err != nil {
		return errors.Join(err, l.end())
	}
	return nil
}

func (l *launching) setCgroups(pid int) error {
	if err := l.cgroups.Apply(pid); err != nil {
		return fmt.Errorf("make the cgroups: %w", err)
	}
	if err := l.cgroups.Set(l.config.Cgroups.Resources); err != nil {
		return fmt.Errorf("set the cgroups: %w", err)
	}
	return nil
}

// exec starts the process, in the cgroup of version 2 unless that is nil.
func (l *launching) exec(unified *os.File) error {
	attributes := &syscall.ProcAttr{Env: []string{}, Sys: &syscall.SysProcAttr{Setsid: true}}
	for _, n := range l.config.Namespaces {
		if n.Path == "" {
			attributes.Sys.Cloneflags |= uintptr(n.Syscall())
		}
	}
	if unified != nil {
		attributes.Sys.UseCgroupFD, attributes.Sys.CgroupFD = true, int(unified.Fd())
	}
	for _, file := range l.files {
		attributes.Files = append(attributes.Files, file.Fd())
	}
	var err error
	l.pid, err = syscall.ForkExec(fmt.Sprintf("/proc/self/fd/%d", launchProgram), []string{launch.Name}, attributes)
	if err != nil {
		return fmt.Errorf("start the program launch: %w", err)
	}
	return nil
}

// save writes libcontainer's state of the container, complete or not at all.
func (l *launching) save() error {
	stat, err := process.ReadStat(l.pid)
	if err != nil {
		return fmt.Errorf("the launched process: %w", err)
	}
	state := &libcontainer.State{
		BaseState:           libcontainer.BaseState{ID: l.id, InitProcessPid: l.pid, InitProcessStartTime: stat.StartTime, Created: time.Now().UTC(), Config: *l.config},
		CgroupPaths:         l.cgroups.GetPaths(),
		NamespacePaths:      make(map[configs.NamespaceType]string),
		ExternalDescriptors: []string{os.DevNull, os.DevNull, os.DevNull},
	}
	for _, kind := range configs.NamespaceTypes() {
		if configs.IsNamespaceSupported(kind) {
			n := configs.Namespace{Type: kind}
			state.NamespacePaths[kind] = n.GetPath(l.pid)
		}
	}
	content, err := json.Marshal(state)
	if err != nil {
		return err
	}
	path := filepath.Join(l.dir, stateFile)
	if err := os.WriteFile(path+".new", content, 0o600); err != nil {
		return err
	}
	return os.Rename(path+".new", path)
}
