// Package engine is what a starter does: it makes a container, or a process in one,
// with libcontainer, or by a program with runc's command line, and what else only
// these can do: updates, hooks, removals. It is the only package that imports
// libcontainer; [Main] runs in `minicri-shim start` alone, never in the supervisor.
//
// A container is created (init waits at the exec barrier), started and deleted, as
// runtime-spec has it. Each call is one process's only one, so nothing here has a
// lock, a limit or a way to be aborted: the supervisor ends a starter with all that it
// has started (package starter).
//
// What another program says of its processes and cgroups is not believed: both are
// checked before the supervisor gets to kill by them (program.go).
package engine

import (
	"fmt"
	"io"
	"os"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/starter"
)

// Main is a starter's life.
func Main() error { return starter.Serve(do) }

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
	if len(r.Program) > 0 {
		c = &programContainer{Request: r}
	}
	switch r.Verb {
	case starter.Create:
		spec, err := starter.ReadSpec(r.Bundle)
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

// container is a container of libcontainer's, or of a program. After an error of exec
// nothing is left of what it has made; after one of create the supervisor removes it.
type container interface {
	create(spec *specs.Spec, given streams) (starter.Answer, error)
	exec(given streams) (pid int, err error)
	start() error
	// setResources may have set a part after an error.
	setResources(wanted *specs.LinuxResources, oomScoreAdj *int) error
	delete() error
}

// streams are the standard streams of a process; those that are nil are /dev/null, which
// for an init is the container's own; an exec has all three, for the node's would be its to
// change. With a terminal all of them are nil, and its master is sent over console.
type streams struct {
	stdio   [3]*os.File
	console *os.File
}

// setOn sets those that are given.
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

// killProcess ends a process that was made for nobody.
func killProcess(pid int) error {
	if pid > 0 {
		_ = unix.Kill(pid, unix.SIGKILL) // it is our child, and cannot be another one
	}
	return nil
}
