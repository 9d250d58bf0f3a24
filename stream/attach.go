package stream

import (
	"context"
	"fmt"
	"net/http"

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
	return s.url("attach", func(one *session, w http.ResponseWriter) {
		e := &execution{session: one, options: options}
		if wantsV5(one.request) {
			one.serveV5(w, options, func(streams clientStreams) error {
				return e.attach(one.request.Context(), r.GetContainerId(), streams)
			})
			return
		}
		remotecommand.ServeAttach(w, one.request, e, "", "", r.GetContainerId(), &options,
			s.options.Idle, s.options.Creation, protocols)
	})
}

// attach shows what a container writes from now on, and gives it input, until
// it has ended or the client goes away.
func (e *execution) attach(ctx context.Context, id string, streams clientStreams) error {
	process, err := e.session.server.options.Containers.Attach(ctx, id)
	if err != nil {
		return err
	}
	l, err := connect(ctx, process, e.options.Stdin)
	if err != nil {
		return fmt.Errorf("attach to container %s: %w", id, err)
	}
	defer l.close()
	l.run(ctx, streams, &e.session.work)
	return ctx.Err()
}
