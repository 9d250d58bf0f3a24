package server

import (
	"context"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
)

// ExecSync runs a command in a container and captures its output.
func (r *Runtime) ExecSync(ctx context.Context, request *runtimeapi.ExecSyncRequest) (*runtimeapi.ExecSyncResponse, error) {
	result, err := r.Containers.ExecSync(ctx, request.GetContainerId(), request.GetCmd(), seconds(request.GetTimeout()))
	if err != nil {
		return nil, err
	}
	return &runtimeapi.ExecSyncResponse{Stdout: result.Stdout, Stderr: result.Stderr, ExitCode: result.Code}, nil
}

// ReopenContainerLog goes on in a new log file after a rotation.
func (r *Runtime) ReopenContainerLog(ctx context.Context, request *runtimeapi.ReopenContainerLogRequest) (*runtimeapi.ReopenContainerLogResponse, error) {
	if err := r.Containers.ReopenLog(ctx, request.GetContainerId()); err != nil {
		return nil, err
	}
	return &runtimeapi.ReopenContainerLogResponse{}, nil
}

// UpdateContainerResources sets resources, all of them or none.
func (r *Runtime) UpdateContainerResources(ctx context.Context, request *runtimeapi.UpdateContainerResourcesRequest) (*runtimeapi.UpdateContainerResourcesResponse, error) {
	if err := r.Containers.Update(ctx, request.GetContainerId(), request.GetLinux()); err != nil {
		return nil, err
	}
	return &runtimeapi.UpdateContainerResourcesResponse{}, nil
}
