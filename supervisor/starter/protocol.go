package starter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/internal/step/failpoint"
)

// Verb is what a starter does.
type Verb string

// The verbs. Those that make a process answer its pid.
const (
	Create Verb = "create" // makes a container whose init waits at the exec barrier
	Exec   Verb = "exec"   // starts a further process
	Start  Verb = "start"  // a program opens the barrier; libcontainer's containers have their poststart hooks run
	Update Verb = "update" // sets resources, all or none
	Delete Verb = "delete" // ends what is left and removes it, then runs poststop hooks
)

// Request is what a starter is to do, for one container.
type Request struct {
	Verb Verb `json:"verb"`
	Container
	InitPID int `json:"init_pid,omitempty"` // of Start

	// Of Create and Exec: which of stdin, stdout and stderr are among the descriptors, or
	// a terminal, whose master is sent over the descriptor.
	Streams  [3]bool `json:"streams,omitempty"`
	Terminal bool    `json:"terminal,omitempty"`

	Process    *specs.Process `json:"process,omitempty"`     // of Exec
	ExecCgroup ExecCgroup     `json:"exec_cgroup,omitempty"` // of Exec

	Resources   json.RawMessage `json:"resources,omitempty"` // of Update: specs.LinuxResources
	OOMScoreAdj *int            `json:"oom_score_adj,omitempty"`
}

// ExecCgroup is the cgroup of an exec, below that of its container; none if Sub is "".
type ExecCgroup struct {
	Controller string `json:"controller,omitempty"` // "" for version 2
	Sub        string `json:"sub,omitempty"`
	Form       string `json:"form,omitempty"` // how the program takes it
}

// How a program takes the cgroup of an exec: runc [CONTROLLER:]PATH; crun PATH alone, below the
// container's of version 2.
const (
	ExecCgroupByName = "name"
	ExecCgroupByPath = "path"
)

// Answer is what a starter has done.
type Answer struct {
	PID     int     `json:"pid,omitempty"`
	Cgroups Cgroups `json:"cgroups,omitempty"` // of Create
	// ExecCgroups, of Create, is how the program takes the cgroup of an exec; "" for not at all.
	ExecCgroups string `json:"exec_cgroups,omitempty"`
	Error       string `json:"error,omitempty"`
	Kind        string `json:"kind,omitempty"` // of the error
}

// Err is the error of an answer, nil for none.
func (a Answer) Err() error {
	if a.Error == "" {
		return nil
	}
	for _, kind := range []error{errdefs.ErrFailedPrecondition, errdefs.ErrInvalidArgument, errdefs.ErrNotFound, errdefs.ErrUnavailable, context.DeadlineExceeded} {
		if kind.Error() == a.Kind {
			return fmt.Errorf("%s: %w", strings.TrimSuffix(a.Error, ": "+a.Kind), kind)
		}
	}
	return errors.New(a.Error)
}

// maxMessage bounds a message: the arguments and the environment of an exec, above all,
// of which the kernel takes 6 MiB (execve(2)).
const maxMessage = 32 << 20

// send writes a message: a byte, with the descriptors, and JSON.
func send(conn *net.UnixConn, message any, files []*os.File) error {
	content, err := json.Marshal(message)
	if err != nil {
		return err
	}
	if len(content) > maxMessage {
		return fmt.Errorf("a message of %d bytes is too long: %w", len(content), errdefs.ErrInvalidArgument)
	}
	var fds []int
	for _, file := range files {
		fds = append(fds, int(file.Fd()))
	}
	if _, _, err := conn.WriteMsgUnix([]byte{0}, unix.UnixRights(fds...), nil); err != nil {
		return err
	}
	_, err = conn.Write(content)
	return err
}

// maxFiles is how many descriptors a request has at most.
const maxFiles = 4

// receive reads a message into one of its type, and returns the descriptors: none of one
// that is not understood.
func receive(conn *net.UnixConn, message any) (files []*os.File, err error) {
	fds, err := socket.Receive(conn, make([]byte, 1), maxFiles)
	if err != nil {
		return nil, err
	}
	for _, fd := range fds {
		files = append(files, os.NewFile(uintptr(fd), "of the request"))
	}
	// The other side says nothing more before it has the answer: no byte of it is lost.
	if err := json.NewDecoder(io.LimitReader(conn, maxMessage)).Decode(message); err != nil {
		closeAll(files)
		return nil, err
	}
	return files, nil
}

func closeAll(files []*os.File) {
	for _, file := range files {
		_ = file.Close()
	}
}

// Socket is the descriptor over which a starter gets its request.
const Socket = 3

// Serve is all of a starter's life: it waits for its request, does it, answers, and
// returns when the supervisor has taken what was made. undo takes back what was made; it
// is called when the supervisor does not take it, because it has ended.
func Serve(do func(request Request, files []*os.File) (answer Answer, undo func() error, err error)) error {
	if err := unix.Prctl(unix.PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0); err != nil {
		return fmt.Errorf("become a sub-reaper: %w", os.NewSyscallError("prctl", err))
	}
	unix.CloseOnExec(Socket)
	supervisor, err := socket.Conn(os.NewFile(Socket, "socket"))
	if err != nil {
		return fmt.Errorf("the socket of a starter: %w", err)
	}
	var request Request
	files, err := receive(supervisor, &request)
	if errors.Is(err, io.EOF) {
		return nil // it is not needed
	}
	if err != nil {
		return fmt.Errorf("read what to start: %w", err)
	}
	if err := failpoint.Hit("starter/asked"); err != nil {
		return err
	}
	answer, undo, failed := do(request, files)
	closeAll(files)
	if failed != nil {
		endChildren()
		answer, undo = Answer{Error: failed.Error(), Kind: errdefs.Resolve(failed).Error()}, nil
	}
	if err = failpoint.Hit("starter/made"); err == nil {
		err = send(supervisor, answer, nil)
	}
	if err == nil {
		err = failpoint.Hit("starter/answered")
	}
	if err == nil && failed == nil {
		_, err = io.ReadFull(supervisor, make([]byte, len(taken)))
	}
	if err != nil && undo != nil {
		err = errors.Join(err, undo())
	}
	return err
}

// endChildren ends what a program has left that did not do what it was asked for: the
// starter is a sub-reaper, so all of it is below.
func endChildren() {
	for _, child := range process.Children("self") {
		process.KillTree(child)
	}
}

// taken is what the supervisor says when it has taken over what was made.
const taken = "taken"
