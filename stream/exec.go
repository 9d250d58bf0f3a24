package stream

import (
	"context"
	"fmt"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
	utilexec "k8s.io/utils/exec"
)

// Exec checks a request to exec, and returns the URL that serves it once.
func (s *Server) Exec(ctx context.Context, r *runtimeapi.ExecRequest) (string, error) {
	options := remotecommand.Options{Stdin: r.GetStdin(), Stdout: r.GetStdout(), Stderr: r.GetStderr(), TTY: r.GetTty()}
	if err := checkStreams(options); err != nil {
		return "", err
	}
	if err := s.options.Containers.CheckExec(ctx, r.GetContainerId(), r.GetCmd()); err != nil {
		return "", err
	}
	return s.url("exec", func(one *session, u *upgrade) {
		one.command(u, options, func(streams clientStreams) error {
			return one.exec(r.GetContainerId(), r.GetCmd(), options, streams)
		})
	})
}

// exec runs a command to its end. Its exit code, if not 0, is an error of its
// own kind.
func (s *session) exec(id string, command []string, o remotecommand.Options, streams clientStreams) error {
	ctx := s.request.Context()
	process, err := s.server.options.Containers.Exec(ctx, id, command, o.Stdin, o.TTY)
	if err != nil {
		return err
	}
	l, err := connect(ctx, process, o.Stdin)
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
		return fmt.Errorf("exec %q in container %s: %w", command, id, err)
	}
	if code != 0 {
		return utilexec.CodeExitError{Err: fmt.Errorf("exit code %d", code), Code: int(code)}
	}
	return nil
}
