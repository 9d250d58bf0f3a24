package stream

import (
	"encoding/json"
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

// transport is how a client speaks in exec and attach. A client that is refused
// has got the error when open fails.
type transport interface {
	open(u *upgrade) (*clientStreams, error)
	// finish sends how the command ended, nil for success.
	finish(err error)
	// close ends the connection; it may be called whatever open returned.
	close()
}

// errRefused is that of an open whose client was answered with an HTTP error.
var errRefused = errors.New("the client was refused")

// transport is the one that the client has asked for.
func (s *session) transport(o remotecommand.Options) transport {
	if wsstream.IsWebSocketRequest(s.request) {
		return &commandWebSocket{session: s, options: o}
	}
	return &commandSPDY{session: s, options: o}
}

// runCommand serves exec or attach over the transport of the client.
func (s *session) runCommand(u *upgrade, r request) {
	t := s.transport(r.options)
	defer t.close()
	streams, err := t.open(u)
	if errors.Is(err, errRefused) {
		return
	}
	if err != nil {
		s.report(r.kind+" has not begun", err)
		return
	}
	if r.kind == kindExec {
		err = s.exec(r, *streams)
	} else {
		err = s.attach(r, *streams)
	}
	if !errors.As(err, new(utilexec.CodeExitError)) {
		s.report(r.kind+" failed", err)
	}
	t.finish(err)
}

// encodeStatus is the last that a client gets: a status in JSON, or for older
// protocols a text, and nothing for success.
func encodeStatus(err error, asJSON bool) []byte {
	status := statusOf(err)
	if !asJSON {
		return []byte(status.Message)
	}
	text, _ := json.Marshal(status) // of strings and a number, it cannot fail
	return text
}

// status is the part of Kubernetes' metav1.Status that clients of exec read.
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
