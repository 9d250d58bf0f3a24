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
	"fmt"
	"io"
	"os"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/supervisor/starter"
)

// Main serves a starter's one request.
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
	if len(r.Runtime) > 0 {
		c = &runtimeContainer{Request: r}
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
