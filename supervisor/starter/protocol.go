package starter

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

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

// Socket is the descriptor over which a starter gets its request.
const Socket = 3

// Taken is what the supervisor says when it has taken over what was made.
const Taken = "taken"
