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
		return fmt.Errorf("exec %q in container %s: %w", r.command, r.target, err)
	}
	if code != 0 {
		return utilexec.CodeExitError{Err: fmt.Errorf("exit code %d", code), Code: int(code)}
	}
	return nil
}
