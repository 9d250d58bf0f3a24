package stream

import (
	"context"
	"fmt"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"k8s.io/cri-streaming/pkg/streaming/remotecommand"
)

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
