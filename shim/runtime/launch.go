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
	files   []*os.File // what the process gets, see withFiles
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
	p, err := c.runtime.own(l, func() error { return c.runtime.start(l) })
	if err != nil {
		return nil, err
	}
	lib, err := libcontainer.Load(c.runtime.root, l.id)
	if err != nil {
		return nil, errors.Join(err, p.Close(), c.runtime.disown(l))
	}
	c.lib = lib
	return p, nil
}

// own has start start the process of a launch, whose parent is from then on the one
// that waits for it.
func (b *Builtin) own(l *launching, start func() error) (*Process, error) {
	pid, err := b.children.own(func() (int, error) {
		err := start()
		return l.pid, err
	})
	if err != nil {
		return nil, err
	}
	p, err := openProcess(pid)
	if err != nil {
		return nil, errors.Join(err, b.disown(l))
	}
	p.reap = func() (syscall.WaitStatus, bool) { return b.children.wait(pid) }
	return p, nil
}

// disown ends the process of a launch that nothing is to wait for.
func (b *Builtin) disown(l *launching) error {
	err := l.end()
	b.children.lose(l.pid)
	return err
}

// start starts the process and waits until it is at the barrier. After an error
// it has ended.
func (b *Builtin) start(l *launching) error {
	filter, err := b.filters.of(l.config.Seccomp)
	if err != nil {
		return err
	}
	barrier := func() (*os.File, error) { return makeFIFO(filepath.Join(l.dir, fifoFile)) }
	more := append([]func() (*os.File, error){b.openEmptyMounts}, trees(l.config)...)
	return l.withFiles(b, barrier, func(ours net.Conn) error {
		list := &launchList{id: l.id, config: l.config, process: l.process, filter: filter}
		var err error
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
	}, more...)
}

// run sends the list to the process, writes libcontainer's state while it works, and
// waits for the answer.
func (l *launching) run(list *launchList, ours net.Conn) error {
	if err := l.send(list, ours); err != nil {
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

// fork makes the cgroups and starts the process, which waits for its list, in the
// namespaces that are new, but for that of mounts. It returns the cgroups that the process has to enter by
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
		if n.Path == "" && n.Type != configs.NEWNS {
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
