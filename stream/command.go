package stream

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"maps"
	"net/http"
	"slices"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	"k8s.io/streaming/pkg/httpstream/wsstream"
	utilexec "k8s.io/utils/exec"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/stream/spdy"
	"github.com/minicri/minicri/supervisor/api"
)

// Exec checks a request and returns the URL that serves it once.
func (s *Server) Exec(ctx context.Context, r *runtimeapi.ExecRequest) (string, error) {
	options, err := streamsOf(r.GetStdin(), r.GetStdout(), r.GetStderr(), r.GetTty())
	if err != nil {
		return "", err
	}
	if err := s.options.Containers.CheckExec(ctx, r.GetContainerId(), r.GetCmd()); err != nil {
		return "", err
	}
	return s.url(request{kind: kindExec, target: r.GetContainerId(), options: options, command: r.GetCmd()})
}

// Attach checks a request and returns the URL that serves it once.
func (s *Server) Attach(ctx context.Context, r *runtimeapi.AttachRequest) (string, error) {
	options, err := streamsOf(r.GetStdin(), r.GetStdout(), r.GetStderr(), r.GetTty())
	if err != nil {
		return "", err
	}
	if err := s.options.Containers.CheckAttach(ctx, r.GetContainerId(), r.GetTty()); err != nil {
		return "", err
	}
	return s.url(request{kind: kindAttach, target: r.GetContainerId(), options: options})
}

func streamsOf(stdin, stdout, stderr, tty bool) (o remotecommand.Options, err error) {
	o = remotecommand.Options{Stdin: stdin, Stdout: stdout, Stderr: stderr, TTY: tty}
	if o.TTY && o.Stderr {
		err = fmt.Errorf("stderr: a terminal has none of its own, tty and stderr exclude each other: %w", errdefs.ErrInvalidArgument)
	} else if !o.Stdin && !o.Stdout && !o.Stderr {
		err = fmt.Errorf("stdin, stdout, stderr: one of them has to be set: %w", errdefs.ErrInvalidArgument)
	}
	return o, err
}

// clientStreams are the client's side of a process. Those not asked for are nil.
type clientStreams struct {
	stdin                  *inlet
	size                   *sizes
	stdout, stderr, status io.WriteCloser
	json                   bool        // status is a status in JSON, not a text
	late                   atomic.Bool // an attached client was
}

func (s *session) runCommand(r request) {
	run := func(streams *clientStreams) {
		err := s.command(r, streams)
		if !errors.As(err, new(utilexec.CodeExitError)) {
			s.report(r.kind+" failed", err)
		}
		status := statusOf(err)
		text := []byte(status.Message)
		if streams.json {
			text, _ = json.Marshal(status) // strings and a number cannot fail
		}
		if len(text) > 0 {
			_, _ = streams.status.Write(text) // fails if the client has left
		}
		_ = streams.status.Close()
	}
	if wsstream.IsWebSocketRequest(s.request) {
		s.commandOverWebSocket(r.options, run)
	} else {
		s.commandOverSPDY(r.options, run)
	}
}

// commandOverSPDY uses a stream for each direction, for the terminal's sizes, and for the status.
func (s *session) commandOverSPDY(o remotecommand.Options, run func(*clientStreams)) {
	conn, protocol, err := s.upgradeSPDY(remotecommand.SupportedStreamingProtocols...)
	if err != nil {
		return // the client has its answer
	}
	resize := o.TTY && (protocol == remotecommand.StreamProtocolV4Name || protocol == remotecommand.StreamProtocolV3Name)
	wanted := map[string]bool{
		remotecommand.StreamTypeStdin: o.Stdin, remotecommand.StreamTypeStdout: o.Stdout, remotecommand.StreamTypeStderr: o.Stderr,
		remotecommand.StreamTypeResize: resize, remotecommand.StreamTypeError: true,
	}
	maps.DeleteFunc(wanted, func(_ string, is bool) bool { return !is })
	streams := &clientStreams{json: protocol == remotecommand.StreamProtocolV4Name}
	complete := make(chan struct{}) // closed when the client has opened all that is wanted
	c := spdy.NewConn(conn, func(stream *spdy.Stream) (spdy.Sink, error) {
		kind := stream.Header.Get(remotecommand.StreamType)
		if !wanted[kind] {
			return nil, fmt.Errorf("stream %q was not asked for, or twice", kind)
		}
		if err := stream.Reply(); err != nil {
			return nil, err
		}
		delete(wanted, kind)
		if len(wanted) == 0 {
			defer close(complete)
		}
		switch kind {
		case remotecommand.StreamTypeStdin:
			streams.stdin = s.newInlet(false)
			return streams.stdin, nil
		case remotecommand.StreamTypeResize:
			streams.size = newSizes(s.ctx)
			return streams.size, nil
		case remotecommand.StreamTypeStdout:
			streams.stdout = stream
		case remotecommand.StreamTypeStderr:
			streams.stderr = stream
		default:
			streams.status = stream
		}
		return nil, nil // the client only reads it
	})
	defer c.Close()
	s.serveSPDY(c)
	select {
	case <-complete:
		run(streams)
	case <-s.ctx.Done():
	case <-time.After(s.server.options.Creation):
		s.report("exec or attach has not begun", errors.New("the client did not open its streams in time (streaming.creation_timeout)"))
	}
}

// commandOverWebSocket uses a channel for each direction, for the status, and for the terminal's sizes.
func (s *session) commandOverWebSocket(o remotecommand.Options, run func(*clientStreams)) {
	sinks := make([]spdy.Sink, remotecommand.StreamResize+1)
	streams := &clientStreams{size: newSizes(s.ctx)} // a client may send sizes without a terminal
	sinks[remotecommand.StreamResize] = streams.size
	if o.Stdin {
		streams.stdin = s.newInlet(false)
		sinks[remotecommand.StreamStdIn] = streams.stdin
	}
	s.serveChannels(commandProtocol, sinks, func(c *channels) {
		streams.json = c.protocol.status
		streams.status = channelWriter{c, remotecommand.StreamErr}
		first := streams.status
		if o.Stderr {
			streams.stderr = channelWriter{c, remotecommand.StreamStdErr}
			first = streams.stderr
		}
		if o.Stdout {
			streams.stdout = channelWriter{c, remotecommand.StreamStdOut}
			first = streams.stdout
		}
		// An empty message on the lowest channel that the client reads begins the session.
		if _, err := first.Write(nil); err == nil {
			run(streams)
		}
	})
}

// commandProtocol parses a subprotocol of exec and attach: "" or [vN.][base64.]channel.k8s.io, with
// the versions of upstream's server, of SPDY's clients, and v5, in which a client can close stdin.
func commandProtocol(name string) (p channelProtocol, served bool) {
	if name == "" {
		return p, true
	}
	version, served := strings.CutSuffix(name, wsstream.ChannelWebSocketProtocol)
	version, p.base64 = strings.CutSuffix(version, "base64.")
	p.halfClose = version == "v5."
	p.status = version == "v4." || p.halfClose
	return p, served && slices.Contains([]string{"", "v2.", "v3.", "v4.", "v5."}, version)
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

// command runs an exec, or attaches the client to a container. A bad exit code is a CodeExitError.
func (s *session) command(r request, streams *clientStreams) error {
	var process *container.Process
	var err error
	if r.kind == kindExec {
		process, err = s.server.options.Containers.Exec(s.ctx, r.target, r.command, r.options.Stdin, r.options.TTY)
	} else {
		process, err = s.server.options.Containers.Attach(s.ctx, r.target)
	}
	if err != nil {
		return err
	}
	var delivered sync.WaitGroup
	disconnect, err := s.connect(process, streams, &delivered)
	if err != nil {
		return fmt.Errorf("%s: streams of container %s: %w", r.kind, r.target, err)
	}
	defer disconnect()
	if r.kind == kindAttach {
		if delivered.Wait(); streams.late.Load() {
			return fmt.Errorf("attach to container %s: the client has taken nothing for %v while the container wrote more, which does not wait longer", r.target, stallTime)
		}
		return s.ctx.Err()
	}
	done := make(chan struct{})
	go func() {
		delivered.Wait()
		close(done)
	}()
	code, err := process.Wait(s.ctx, done)
	<-done
	if err != nil {
		return fmt.Errorf("exec %s in container %s: %w", container.CommandText(r.command), r.target, err)
	}
	if code != 0 {
		return utilexec.CodeExitError{Err: fmt.Errorf("exit code %d", code), Code: int(code)}
	}
	return nil
}

// connect connects a process with the client. It also reads outputs that the client did not ask
// for, since a process blocks when its output is not read.
func (s *session) connect(process *container.Process, streams *clientStreams, delivered *sync.WaitGroup) (disconnect func(), err error) {
	var open []io.Closer
	disconnect = func() {
		for _, stream := range open {
			_ = stream.Close()
		}
	}
	outputs := make(map[string]io.ReadCloser)
	for _, name := range process.Outputs {
		if outputs[name], err = process.Output(s.ctx, name); err != nil {
			disconnect()
			return nil, err
		}
		open = append(open, outputs[name])
	}
	var in container.Input
	if streams.stdin != nil && process.Stdin {
		if in, err = process.Input(s.ctx); err != nil {
			disconnect()
			return nil, err
		}
		open = append(open, in)
	}
	if !process.IsExec() { // Wait ends an exec before its outputs
		context.AfterFunc(s.ctx, disconnect)
	}
	if streams.stdin != nil {
		streams.stdin.lead(in)
	}
	if streams.size != nil {
		s.work.Go(func() { streams.size.set(process) })
	}
	for _, name := range process.Outputs {
		to := streams.stdout
		if name == api.Stderr {
			to = streams.stderr
		}
		if to != nil && !process.IsExec() {
			to = prompt{to, func() { streams.late.Store(true); disconnect() }}
		}
		delivered.Go(func() { deliver(to, outputs[name]) })
	}
	return disconnect, nil
}

// prompt is an output of a container that an attached client has to take within stallTime.
type prompt struct {
	io.WriteCloser
	late func()
}

func (p prompt) Write(b []byte) (int, error) {
	defer time.AfterFunc(stallTime, p.late).Stop()
	return p.WriteCloser.Write(b)
}

// deliver copies an output to the client; nil drops it.
func deliver(to io.WriteCloser, from io.ReadCloser) {
	if to == nil {
		_, _ = io.Copy(io.Discard, from)
		return
	}
	buffer := make([]byte, 64<<10) // the most that the supervisor sends at once
	if _, err := io.CopyBuffer(to, struct{ io.Reader }{from}, buffer); err != nil {
		_ = from.Close() // the process gets SIGPIPE, as from a shell's reader
		return
	}
	_ = to.Close()
}

const (
	resizeEvery = 500 * time.Millisecond // how often a terminal's size is set
	maxSizes    = 64 << 10               // bytes between breaks: 1000 sizes; a person sends 10 a second
	largestSize = 1 << 10                // much longer than a size in JSON
)

// sizes is the sink of a terminal's sizes. It keeps the last one.
type sizes struct {
	ctx  context.Context
	last chan remotecommand.TerminalSize // not set yet
	text []byte                          // perhaps the beginning of the next
	read int
}

func newSizes(ctx context.Context) *sizes {
	return &sizes{ctx: ctx, last: make(chan remotecommand.TerminalSize, 1)}
}

func (s *sizes) Write(p []byte) (int, error) {
	var size *remotecommand.TerminalSize
	if size, s.text = lastSize(append(s.text, p...)); size != nil {
		select {
		case <-s.last:
		default:
		}
		s.last <- *size
	}
	if s.read += len(p); s.read >= maxSizes {
		s.read = 0
		wait(s.ctx, resizeEvery)
	}
	return len(p), nil
}

func (s *sizes) CloseWrite() {}
func (s *sizes) Abort()      {}

// set resizes the terminal every resizeEvery at most. The process may have exited.
func (s *sizes) set(process *container.Process) {
	for {
		select {
		case size := <-s.last:
			if size.Width > 0 && size.Height > 0 {
				_ = process.Resize(s.ctx, uint32(size.Width), uint32(size.Height))
				wait(s.ctx, resizeEvery)
			}
		case <-s.ctx.Done():
			return
		}
	}
}

// lastSize decodes the last complete size, an object of JSON. rest may be the beginning of the next.
func lastSize(text []byte) (size *remotecommand.TerminalSize, rest []byte) {
	end := bytes.LastIndexByte(text, '}')
	if begin := bytes.LastIndexByte(text[:end+1], '{'); begin >= 0 {
		size = new(remotecommand.TerminalSize)
		if json.Unmarshal(text[begin:end+1], size) != nil {
			size = nil
		}
	}
	rest = text[end+1:]
	return size, append(text[:0], rest[max(0, len(rest)-largestSize):]...)
}

func wait(ctx context.Context, d time.Duration) {
	select {
	case <-time.After(d):
	case <-ctx.Done():
	}
}
