package server

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// Streams makes the URLs that clients of exec, attach and port-forward go to.
type Streams interface {
	Exec(context.Context, *runtimeapi.ExecRequest) (url string, err error)
	Attach(context.Context, *runtimeapi.AttachRequest) (url string, err error)
	PortForward(context.Context, *runtimeapi.PortForwardRequest) (url string, err error)
}

// ExecSync runs a command in a container and captures its output.
func (r *Runtime) ExecSync(ctx context.Context, request *runtimeapi.ExecSyncRequest) (*runtimeapi.ExecSyncResponse, error) {
	result, err := r.Containers.ExecSync(ctx, request.GetContainerId(), request.GetCmd(), seconds(request.GetTimeout()))
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ExecSyncResponse{Stdout: result.Stdout, Stderr: result.Stderr, ExitCode: result.Code}, nil
}

// Exec answers with a URL that runs a command in a container, once.
func (r *Runtime) Exec(ctx context.Context, request *runtimeapi.ExecRequest) (*runtimeapi.ExecResponse, error) {
	url, err := r.Streams.Exec(ctx, request)
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ExecResponse{Url: url}, nil
}

// Attach answers with a URL that attaches to a container, once.
func (r *Runtime) Attach(ctx context.Context, request *runtimeapi.AttachRequest) (*runtimeapi.AttachResponse, error) {
	url, err := r.Streams.Attach(ctx, request)
	if err != nil {
		return nil, err
	}
	return &runtimeapi.AttachResponse{Url: url}, nil
}

// PortForward answers with a URL that forwards ports of a pod, for one session.
func (r *Runtime) PortForward(ctx context.Context, request *runtimeapi.PortForwardRequest) (*runtimeapi.PortForwardResponse, error) {
	url, err := r.Streams.PortForward(ctx, request)
	if err != nil {
		return nil, err
	}
	return &runtimeapi.PortForwardResponse{Url: url}, nil
}
