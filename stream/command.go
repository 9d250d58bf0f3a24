package stream

import (
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"

	"github.com/containerd/errdefs"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	utilexec "k8s.io/utils/exec"
)

// clientStreams are the client's side of a process. Those that were not asked
// for are nil; size is nil without a terminal.
type clientStreams struct {
	stdin          io.Reader
	stdout, stderr io.WriteCloser
	size           <-chan remotecommand.TerminalSize
}

func checkStreams(o remotecommand.Options) error {
	if o.TTY && o.Stderr {
		return fmt.Errorf("stderr: a terminal has none of its own, tty and stderr exclude each other: %w", errdefs.ErrInvalidArgument)
	}
	if !o.Stdin && !o.Stdout && !o.Stderr {
		return fmt.Errorf("stdin, stdout, stderr: one of them has to be set: %w", errdefs.ErrInvalidArgument)
	}
	return nil
}

// command serves exec or attach, which differ in what is run, in the protocol
// that the client has chosen.
func (s *session) command(u *upgrade, o remotecommand.Options, run func(clientStreams) error) {
	serve := s.commandSPDY
	if wsstream.IsWebSocketRequest(s.request) {
		serve = s.commandWebSocket
	}
	serve(u, o, func(streams clientStreams) error {
		err := run(streams)
		if !errors.As(err, new(utilexec.CodeExitError)) {
			s.report("exec or attach failed", err)
		}
		return err
	})
}

// status is what is left of Kubernetes' metav1.Status, the last that a client
// is told.
type status struct {
	Status  string   `json:"status"`
	Message string   `json:"message,omitempty"`
	Reason  string   `json:"reason,omitempty"`
	Details *details `json:"details,omitempty"`
	Code    int      `json:"code,omitempty"`
}

type details struct {
	Causes []cause `json:"causes"`
}

type cause struct {
	Reason  string `json:"reason"`
	Message string `json:"message"`
}

func statusOf(err error) status {
	var exit utilexec.CodeExitError
	switch {
	case err == nil:
		return status{Status: "Success"}
	case errors.As(err, &exit):
		return status{
			Status: "Failure", Reason: remotecommand.NonZeroExitCodeReason,
			Message: fmt.Sprintf("command terminated with non-zero exit code: %v", err),
			Details: &details{Causes: []cause{{Reason: remotecommand.ExitCodeCauseType, Message: strconv.Itoa(exit.Code)}}},
		}
	default:
		return status{Status: "Failure", Reason: "InternalError", Message: err.Error(), Code: http.StatusInternalServerError}
	}
}
