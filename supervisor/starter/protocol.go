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

	"github.com/minicri/minicri/internal/socket"
	"github.com/minicri/minicri/supervisor/bundle"
)

// Verb is what a starter does. The answer of Create and Exec has the pid.
type Verb string

// The verbs.
const (
	Create Verb = "create" // makes a container whose init waits at the exec barrier
	Exec   Verb = "exec"   // starts a further process
	Start  Verb = "start"  // opens the barrier of a runtime's container; runs the poststart hooks of libcontainer's
	Update Verb = "update" // sets resources, all or none
	Delete Verb = "delete" // kills and removes what is left, then runs poststop hooks
)

// Request is a starter's task, for one container.
type Request struct {
	Verb Verb `json:"verb"`
	bundle.Container
	InitPID     int             `json:"init_pid,omitempty"`    // of Start
	Streams     [3]bool         `json:"streams,omitempty"`     // of Create and Exec: which are sent
	Terminal    bool            `json:"terminal,omitempty"`    // instead, the one descriptor takes the terminal's master
	Process     *specs.Process  `json:"process,omitempty"`     // of Exec
	ExecCgroup  ExecCgroup      `json:"exec_cgroup,omitempty"` // of Exec
	Resources   json.RawMessage `json:"resources,omitempty"`   // of Update: specs.LinuxResources
	OOMScoreAdj *int            `json:"oom_score_adj,omitempty"`
}

// ExecCgroup is the cgroup of an exec, below the container's; none if Sub is "".
type ExecCgroup struct {
	Controller string `json:"controller,omitempty"` // "" for version 2
	Sub        string `json:"sub,omitempty"`
	Form       string `json:"form,omitempty"` // how the runtime takes it
}

// How a runtime takes an exec's cgroup: runc [CONTROLLER:]PATH; crun PATH alone, below the container's of version 2.
const (
	ExecCgroupByName = "name"
	ExecCgroupByPath = "path"
)

// Answer is a starter's result.
type Answer struct {
	PID         int            `json:"pid,omitempty"`
	Cgroups     bundle.Cgroups `json:"cgroups,omitempty"`      // of Create
	ExecCgroups string         `json:"exec_cgroups,omitempty"` // of Create: how later execs name their cgroup; "" for not at all
	Error       string         `json:"error,omitempty"`
	Kind        string         `json:"kind,omitempty"` // of the error
}

// Err returns the error of an answer, nil for none.
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

// maxMessage is far above the 6 MiB of arguments and environment that the kernel takes (execve(2)).
const maxMessage = 32 << 20

// Send writes a message: a byte, with the descriptors, and JSON.
func Send(conn *net.UnixConn, message any, files []*os.File) error {
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

// Receive reads a message, and returns its descriptors, even after an error.
func Receive(conn *net.UnixConn, message any) (files []*os.File, err error) {
	const maxFiles = 4
	fds, err := socket.Receive(conn, make([]byte, 1), maxFiles)
	if err != nil {
		return nil, err
	}
	for _, fd := range fds {
		files = append(files, os.NewFile(uintptr(fd), "of the request"))
	}
	// Nothing follows before the answer, so the decoder buffers no further message.
	return files, json.NewDecoder(io.LimitReader(conn, maxMessage)).Decode(message)
}

// Socket is the descriptor over which a starter gets its request.
const Socket = 3

// Taken is what the supervisor says when it has taken over what was made.
const Taken = "taken"
