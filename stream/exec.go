package stream

import (
	"context"
	"fmt"
	"io"
	"net/http"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

// protocols are those of SPDY clients, the preferred one first.
var protocols = []string{remotecommand.StreamProtocolV4Name}

// Exec checks a request to exec, and returns the URL that serves it once.
func (s *Server) Exec(ctx context.Context, r *runtimeapi.ExecRequest) (string, error) {
	options := remotecommand.Options{Stdin: r.GetStdin(), Stdout: r.GetStdout(), Stderr: r.GetStderr(), TTY: r.GetTty()}
	if err := checkStreams(options); err != nil {
		return "", err
	}
	if err := s.options.Containers.CheckExec(ctx, r.GetContainerId(), r.GetCmd()); err != nil {
		return "", err
	}
	return s.url("exec", func(one *session, w http.ResponseWriter) {
		e := &execution{session: one, options: options}
		if wantsV5(one.request) {
			one.serveV5(w, options, func(streams clientStreams) error {
				return e.exec(one.request.Context(), r.GetContainerId(), r.GetCmd(), streams)
			})
			return
		}
		remotecommand.ServeExec(w, one.request, e, "", "", r.GetContainerId(), r.GetCmd(), &options,
			s.options.Idle, s.options.Creation, protocols)
	})
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

// execution is what the library calls when the client's streams are there.
type execution struct {
	session *session
	options remotecommand.Options
}

// ExecInContainer implements remotecommand.Executor.
func (e *execution) ExecInContainer(ctx context.Context, _, _, id string, command []string, in io.Reader, out, errs io.WriteCloser, _ bool, size <-chan remotecommand.TerminalSize, _ time.Duration) error {
	return e.exec(ctx, id, command, asked(e.options, in, out, errs, size))
}

// AttachContainer implements remotecommand.Attacher.
func (e *execution) AttachContainer(ctx context.Context, _, _, id string, in io.Reader, out, errs io.WriteCloser, _ bool, size <-chan remotecommand.TerminalSize) error {
	return e.attach(ctx, id, asked(e.options, in, out, errs, size))
}

// asked are the streams that were asked for: over WebSocket the library gives
// all of them.
func asked(o remotecommand.Options, in io.Reader, out, errs io.WriteCloser, size <-chan remotecommand.TerminalSize) clientStreams {
	streams := clientStreams{size: size}
	if o.Stdin {
		streams.stdin = in
	}
	if o.Stdout {
		streams.stdout = out
	}
	if o.Stderr {
		streams.stderr = errs
	}
	return streams
}

// exec runs a command to its end. Its exit code is an error, if not 0, of the
// kind that the library looks for.
func (e *execution) exec(ctx context.Context, id string, command []string, streams clientStreams) error {
	process, err := e.session.server.options.Containers.Exec(ctx, id, command, e.options.Stdin, e.options.TTY)
	if err != nil {
		return err
	}
	l, err := connect(ctx, process, e.options.Stdin)
	if err != nil {
		process.End(ctx)
		return err
	}
	defer l.close()
	var code int32
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		code, err = process.Wait(ctx)
	}()
	l.run(ctx, streams, &e.session.work)
	<-ended
	if err != nil {
		return fmt.Errorf("exec %q in container %s: %w", command, id, err)
	}
	if code != 0 {
		return utilexec.CodeExitError{Err: fmt.Errorf("exit code %d", code), Code: int(code)}
	}
	return nil
}
