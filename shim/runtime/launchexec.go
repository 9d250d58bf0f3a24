package runtime

import (
	"errors"
	"fmt"
	"log/slog"
	"net"
	"os"
	"path/filepath"
	goruntime "runtime"
	"syscall"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/shim/runtime/launch"
)

// startExec starts a further process: by a launch if that can do all that it needs.
// A launch in which anything fails has run nothing of the container's, and
// libcontainer then does it again: what is wrong is said by it alone. One that hangs
// is not repeated: that would hang too.
func (c *builtinContainer) startExec(process *libcontainer.Process, streams Streams, t *tree) (*Process, error) {
	config := c.lib.Config()
	if execNeedsInit(&config, process, streams) == "" {
		p, err := c.launchExec(&config, process, streams, t)
		if err == nil || errors.Is(err, errdefs.ErrUnavailable) || errors.Is(err, errStillRuns) {
			return p, err
		}
		slog.Debug("an exec is started by libcontainer's init", "container", c.lib.ID(), "reason", err)
	}
	// Only now: a cgroup cannot be made while the lock is held.
	go cgroup.WarmLock() // one write(2)
	return c.start(process, streams, t)
}

// execLaunch is the start of an exec without libcontainer's init.
type execLaunch struct {
	launching
	init *Process // the container's first process, whose namespaces are joined
	tree *tree    // nil: the exec has no cgroup of its own
	list *execList
}

func (c *builtinContainer) launchExec(config *configs.Config, process *libcontainer.Process, streams Streams, t *tree) (*Process, error) {
	init, err := Find(c.init.PID, c.init.StartTime)
	if err != nil {
		return nil, err
	}
	defer init.Close()
	filter, err := c.runtime.filters.of(config.Seccomp)
	if err != nil {
		return nil, err
	}
	environment, err := execEnvironment(config, process, init.PID)
	if err != nil {
		return nil, err
	}
	l := &execLaunch{init: init, tree: t, launching: launching{id: c.lib.ID(), dir: c.dir, config: config, process: process, streams: streams}}
	l.list = &execList{launchList: launchList{id: l.id, config: config, process: process, filter: filter}, environment: environment}
	p, err := c.runtime.own(&l.launching, func() error { return l.run(c.runtime, c.cgroups) })
	if err != nil {
		return nil, err
	}
	p.tree = t
	return p, nil
}

// run starts the process and waits until it has executed the program. After an
// error it has ended, and has not executed it.
func (l *execLaunch) run(b *Builtin, cgroups map[string]string) error {
	return l.withFiles(b, l.init.copyPidfd, func(ours net.Conn) error {
		if err := l.giveStreams(); err != nil {
			return err
		}
		if err := l.fork(cgroups); err != nil {
			return err
		}
		err := l.list.fill()
		if err == nil {
			err = l.follow(ours)
		}
		if err != nil {
			return errors.Join(err, l.end())
		}
		return nil
	})
}

// giveStreams gives the streams to the user of the process.
func (l *execLaunch) giveStreams() error {
	for number, given := range l.streams.files() {
		if given == nil {
			continue
		}
		if err := giveTo(l.files[number], l.process.UID); err != nil {
			return err
		}
	}
	return nil
}

// giveTo gives a stream to the user of the process, who can then open it by its
// name in /proc/self/fd. Where that is refused it stays as it is, as with
// libcontainer (fixStdioPermissions).
func giveTo(stream *os.File, uid int) error {
	var stat unix.Stat_t
	if err := unix.Fstat(int(stream.Fd()), &stat); err != nil {
		return fmt.Errorf("owner of the streams: %w", err)
	}
	if int(stat.Uid) == uid {
		return nil
	}
	err := unix.Fchown(int(stream.Fd()), uid, -1)
	if err != nil && !errors.Is(err, unix.EPERM) && !errors.Is(err, unix.EROFS) {
		return fmt.Errorf("owner of the streams: %w", err)
	}
	return nil
}

// fork starts the process in the pid namespace of the container, in its cgroup of
// version 2; those of version 1 it enters by itself.
func (l *execLaunch) fork(cgroups map[string]string) error {
	l.list.cgroups = make(map[string]string)
	attributes := &syscall.ProcAttr{Env: []string{}, Sys: &syscall.SysProcAttr{Setsid: true}}
	for controller, path := range cgroups {
		if l.tree != nil && controller == l.tree.controller {
			path = filepath.Join(path, l.tree.sub)
		}
		if controller != "" {
			l.list.cgroups[controller] = path
			continue
		}
		dir, err := os.OpenFile(path, unix.O_PATH|unix.O_DIRECTORY, 0)
		if err != nil {
			return err
		}
		defer dir.Close()
		attributes.Sys.UseCgroupFD, attributes.Sys.CgroupFD = true, int(dir.Fd())
	}
	for _, file := range l.files {
		attributes.Files = append(attributes.Files, file.Fd())
	}
	return inPIDNamespace(l.files[execInit], func() (err error) {
		l.pid, err = syscall.ForkExec(fmt.Sprintf("/proc/self/fd/%d", launchProgram), []string{launch.Name}, attributes)
		return err
	})
}

// inPIDNamespace calls fork on a thread whose children are made in the pid
// namespace of a process (pid_namespaces(7), setns(2)).
func inPIDNamespace(pidfd *os.File, fork func() error) error {
	ours, err := os.Open("/proc/self/ns/pid")
	if err != nil {
		return err
	}
	defer ours.Close()
	failed := make(chan error)
	go func() {
		goruntime.LockOSThread()
		err := unix.Setns(int(pidfd.Fd()), unix.CLONE_NEWPID)
		if err == nil {
			err = fork()
			if unix.Setns(int(ours.Fd()), unix.CLONE_NEWPID) != nil {
				failed <- err
				return // the thread, which is locked, ends with this goroutine
			}
		}
		goruntime.UnlockOSThread()
		failed <- err
	}()
	return <-failed
}

// follow hands the list to the process, and waits until the socket is closed, by
// the execution of the program or by the end of the process.
func (l *execLaunch) follow(ours net.Conn) error {
	if err := l.send(l.list, ours); err != nil {
		return err
	}
	err := l.list.ReadAnswer(ours)
	switch {
	case errors.Is(err, os.ErrDeadlineExceeded):
		return fmt.Errorf("launch %s: it is not executed after %v: %w", l.process.Args[0], launchLimit, errdefs.ErrUnavailable)
	case !errors.Is(err, launch.ErrEnded):
		return fmt.Errorf("launch %s: %w", l.process.Args[0], err)
	}
	return nil
}
