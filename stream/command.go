package stream

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"net/http"
	"strconv"
	"sync"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	utilexec "k8s.io/utils/exec"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/stream/spdy"
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

// Exec checks a request to exec, and returns the URL that serves it once.
func (s *Server) Exec(ctx context.Context, r *runtimeapi.ExecRequest) (string, error) {
	options := remotecommand.Options{Stdin: r.GetStdin(), Stdout: r.GetStdout(), Stderr: r.GetStderr(), TTY: r.GetTty()}
	if err := checkStreams(options); err != nil {
		return "", err
	}
	if err := s.options.Containers.CheckExec(ctx, r.GetContainerId(), r.GetCmd()); err != nil {
		return "", err
	}
	return s.url(request{kind: kindExec, target: r.GetContainerId(), options: options, command: r.GetCmd()})
}

// exec runs a command to its end. Its exit code, if not 0, is an error of its
// own kind.
func (s *session) exec(r request, streams clientStreams) error {
	ctx := s.request.Context()
	process, err := s.server.options.Containers.Exec(ctx, r.target, r.command, r.options.Stdin, r.options.TTY)
	if err != nil {
		return err
	}
	l, err := connect(ctx, process, r.options.Stdin)
	if err != nil {
		process.End(ctx)
		return err
	}
	defer l.close()
	var code int32
	ended := make(chan struct{})
	s.work.Go(func() {
		defer close(ended)
		code, err = process.Wait(ctx)
	})
	l.run(ctx, streams, &s.work)
	<-ended
	if err != nil {
		return fmt.Errorf("exec %s in container %s: %w", container.CommandText(r.command), r.target, err)
	}
	if code != 0 {
		return utilexec.CodeExitError{Err: fmt.Errorf("exit code %d", code), Code: int(code)}
	}
	return nil
}

// Attach checks a request to attach, and returns the URL that serves it once.
func (s *Server) Attach(ctx context.Context, r *runtimeapi.AttachRequest) (string, error) {
	options := remotecommand.Options{Stdin: r.GetStdin(), Stdout: r.GetStdout(), Stderr: r.GetStderr(), TTY: r.GetTty()}
	if err := checkStreams(options); err != nil {
		return "", err
	}
	if err := s.options.Containers.CheckAttach(ctx, r.GetContainerId(), r.GetTty()); err != nil {
		return "", err
	}
	return s.url(request{kind: kindAttach, target: r.GetContainerId(), options: options})
}

// attach shows what a container writes from now on, and gives it input, until
// it has ended or the client leaves.
func (s *session) attach(r request, streams clientStreams) error {
	ctx := s.request.Context()
	process, err := s.server.options.Containers.Attach(ctx, r.target)
	if err != nil {
		return err
	}
	l, err := connect(ctx, process, r.options.Stdin)
	if err != nil {
		return fmt.Errorf("attach to container %s: %w", r.target, err)
	}
	defer l.close()
	l.run(ctx, streams, &s.work)
	return ctx.Err()
}

// commandSPDY serves exec or attach over SPDY: a stream for each direction, one
// for the sizes of a terminal, and one for the status at the end. It is a
// transport.
type commandSPDY struct {
	session  *session
	options  remotecommand.Options
	conn     *spdy.Conn
	protocol string
	streams  clientStreams
	status   *spdy.Stream
	complete chan struct{} // closed when the client has opened all of wanted

	mu     sync.Mutex
	wanted map[string]bool // types of streams that are still to come
}

func (t *commandSPDY) open(u *upgrade) (*clientStreams, error) {
	conn, protocol, err := t.session.upgradeSPDY(u, remotecommand.SupportedStreamingProtocols...)
	if err != nil {
		return nil, errRefused // the client has its answer
	}
	t.protocol = protocol
	t.complete = make(chan struct{})
	// Before v3 there are no sizes.
	resize := t.options.TTY && (protocol == remotecommand.StreamProtocolV4Name || protocol == remotecommand.StreamProtocolV3Name)
	t.wanted = map[string]bool{remotecommand.StreamTypeError: true}
	for kind, wanted := range map[string]bool{
		remotecommand.StreamTypeStdin: t.options.Stdin, remotecommand.StreamTypeStdout: t.options.Stdout,
		remotecommand.StreamTypeStderr: t.options.Stderr, remotecommand.StreamTypeResize: resize,
	} {
		if wanted {
			t.wanted[kind] = true
		}
	}
	t.conn = spdy.NewConn(conn, t.accept)
	t.session.serveSPDY(t.conn)
	return &t.streams, t.await()
}

// accept is called for a stream of the client.
func (t *commandSPDY) accept(stream *spdy.Stream) (spdy.Sink, error) {
	t.mu.Lock()
	defer t.mu.Unlock()
	kind := stream.Header.Get(remotecommand.StreamType)
	if !t.wanted[kind] {
		return nil, fmt.Errorf("stream %q was not asked for, or twice", kind)
	}
	if err := stream.Reply(); err != nil {
		return nil, err
	}
	delete(t.wanted, kind)
	if len(t.wanted) == 0 {
		defer close(t.complete)
	}
	switch kind {
	case remotecommand.StreamTypeStdin:
		input := t.session.newInput()
		t.streams.stdin = input.reader
		return input, nil
	case remotecommand.StreamTypeResize:
		input := t.session.newInput()
		t.streams.size = t.session.sizes(input.reader)
		return input, nil
	case remotecommand.StreamTypeStdout:
		t.streams.stdout = stream
	case remotecommand.StreamTypeStderr:
		t.streams.stderr = stream
	case remotecommand.StreamTypeError:
		t.status = stream
	}
	return nil, nil // the client only reads it
}

// await waits for the client to open its streams.
func (t *commandSPDY) await() error {
	expired := time.NewTimer(t.session.server.options.Creation)
	defer expired.Stop()
	select {
	case <-t.complete:
		return nil
	case <-t.session.request.Context().Done():
		return t.session.request.Context().Err()
	case <-expired.C:
		return errors.New("the client did not open its streams in time (streaming.creation_timeout)")
	}
}

func (t *commandSPDY) finish(err error) {
	_, _ = t.status.Write(encodeStatus(err, t.protocol == remotecommand.StreamProtocolV4Name)) // fails if the client has left
	_ = t.status.Close()
}

func (t *commandSPDY) close() {
	if t.conn != nil {
		_ = t.conn.Close()
	}
}

// remoteCommandProtocols are the subprotocols of exec and attach over a
// WebSocket: those of upstream's server, v5, in which a client can close its
// stdin, and what SPDY's clients call the same versions. Only v4 and v5 have a
// status in JSON.
func remoteCommandProtocols() map[string]channelProtocol {
	const v4, base64 = "v4.", "base64."
	return map[string]channelProtocol{
		"":                                 {},
		remotecommand.StreamProtocolV1Name: {},
		base64 + remotecommand.StreamProtocolV1Name:         {base64: true},
		remotecommand.StreamProtocolV2Name:                  {},
		"v2." + base64 + remotecommand.StreamProtocolV1Name: {base64: true},
		remotecommand.StreamProtocolV3Name:                  {},
		"v3." + base64 + remotecommand.StreamProtocolV1Name: {base64: true},
		remotecommand.StreamProtocolV4Name:                  {status: true},
		v4 + base64 + remotecommand.StreamProtocolV1Name:    {status: true, base64: true},
		remotecommand.StreamProtocolV5Name:                  {status: true, halfClose: true},
		"v5." + base64 + remotecommand.StreamProtocolV1Name: {status: true, base64: true, halfClose: true},
	}
}

// commandWebSocket serves exec or attach over a WebSocket: a channel for each
// direction, one for the status, one for the sizes of a terminal. It is a
// transport.
type commandWebSocket struct {
	session  *session
	options  remotecommand.Options
	channels *channels
}

func (t *commandWebSocket) open(u *upgrade) (*clientStreams, error) {
	sinks := make([]sink, remotecommand.StreamResize+1)
	streams := &clientStreams{}
	if t.options.Stdin {
		input := t.session.newInput()
		sinks[remotecommand.StreamStdIn], streams.stdin = input, input.reader
	}
	// Always read: a client may send sizes without a terminal.
	input := t.session.newInput()
	sinks[remotecommand.StreamResize], streams.size = input, t.session.sizes(input.reader)
	var err error
	if t.channels, err = t.session.openChannels(u, remoteCommandProtocols(), sinks); err != nil {
		return nil, errRefused // the client has its answer
	}
	if t.options.Stdout {
		streams.stdout = t.channels.writer(remotecommand.StreamStdOut)
	}
	if t.options.Stderr {
		streams.stderr = t.channels.writer(remotecommand.StreamStdErr)
	}
	_, err = t.first().Write(nil)
	return streams, err
}

// first is the lowest channel that the client reads. An empty message on it says
// that the session has begun.
func (t *commandWebSocket) first() io.Writer {
	switch {
	case t.options.Stdout:
		return t.channels.writer(remotecommand.StreamStdOut)
	case t.options.Stderr:
		return t.channels.writer(remotecommand.StreamStdErr)
	}
	return t.channels.writer(remotecommand.StreamErr)
}

func (t *commandWebSocket) finish(err error) {
	if text := encodeStatus(err, t.channels.protocol.status); len(text) > 0 {
		_, _ = t.channels.writer(remotecommand.StreamErr).Write(text) // fails if the client has left
	}
}

func (t *commandWebSocket) close() {
	if t.channels != nil {
		t.channels.close()
	}
}
