package server

import (
	"cmp"
	"context"
	"fmt"
	"math"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
)

// CreateContainer makes a container in a pod, which does not run yet.
func (r *Runtime) CreateContainer(ctx context.Context, request *runtimeapi.CreateContainerRequest) (*runtimeapi.CreateContainerResponse, error) {
	if request.GetConfig() == nil {
		return nil, fmt.Errorf("config: is missing: %w", errdefs.ErrInvalidArgument)
	}
	id, err := r.Containers.Create(ctx, request.GetPodSandboxId(), request.GetConfig(), request.GetSandboxConfig())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.CreateContainerResponse{ContainerId: id}, nil
}

// StartContainer lets a created container run, once.
func (r *Runtime) StartContainer(ctx context.Context, request *runtimeapi.StartContainerRequest) (*runtimeapi.StartContainerResponse, error) {
	return &runtimeapi.StartContainerResponse{}, r.Containers.Start(ctx, request.GetContainerId())
}

// StopContainer ends a container, with the grace of its timeout in seconds.
func (r *Runtime) StopContainer(ctx context.Context, request *runtimeapi.StopContainerRequest) (*runtimeapi.StopContainerResponse, error) {
	return &runtimeapi.StopContainerResponse{}, r.Containers.Stop(ctx, request.GetContainerId(), seconds(request.GetTimeout()))
}

// seconds converts a timeout of the CRI; it takes a negative one as 0, and bounds it by Duration.
func seconds(n int64) time.Duration {
	const most = int64(math.MaxInt64 / time.Second)
	return time.Duration(min(max(0, n), most)) * time.Second
}

// RemoveContainer removes a container, running or not.
func (r *Runtime) RemoveContainer(ctx context.Context, request *runtimeapi.RemoveContainerRequest) (*runtimeapi.RemoveContainerResponse, error) {
	return &runtimeapi.RemoveContainerResponse{}, r.Containers.Remove(ctx, request.GetContainerId())
}

// ReopenContainerLog continues in a new log file after a rotation.
func (r *Runtime) ReopenContainerLog(ctx context.Context, request *runtimeapi.ReopenContainerLogRequest) (*runtimeapi.ReopenContainerLogResponse, error) {
	return &runtimeapi.ReopenContainerLogResponse{}, r.Containers.ReopenLog(ctx, request.GetContainerId())
}

// notWindows returns the error of a field for Windows, which would have no effect here.
func notWindows(field string) error {
	return fmt.Errorf("%s: is set, but this node runs Linux: %w", field, errdefs.ErrInvalidArgument)
}

// UpdateContainerResources sets all of the resources or none, and refuses those of Windows.
func (r *Runtime) UpdateContainerResources(ctx context.Context, request *runtimeapi.UpdateContainerResourcesRequest) (*runtimeapi.UpdateContainerResourcesResponse, error) {
	if request.GetWindows() != nil {
		return nil, notWindows("windows")
	}
	return &runtimeapi.UpdateContainerResourcesResponse{}, r.Containers.Update(ctx, request.GetContainerId(), request.GetLinux())
}

// CheckpointContainer is not supported. The generated answer names the method and not the runtime.
func (r *Runtime) CheckpointContainer(_ context.Context, request *runtimeapi.CheckpointContainerRequest) (*runtimeapi.CheckpointContainerResponse, error) {
	return nil, fmt.Errorf("checkpoint container %s: minicri makes no checkpoints: %w", request.GetContainerId(), errdefs.ErrNotImplemented)
}

// ContainerStatus describes one container, without waiting for a lock; NotFound if there is none.
func (r *Runtime) ContainerStatus(_ context.Context, request *runtimeapi.ContainerStatusRequest) (*runtimeapi.ContainerStatusResponse, error) {
	c, err := r.Containers.Find(request.GetContainerId())
	if err != nil {
		return nil, err
	}
	response := &runtimeapi.ContainerStatusResponse{Status: containerStatus(c)}
	if !request.GetVerbose() {
		return response, nil
	}
	spec, err := r.Containers.Spec(c)
	if err != nil {
		spec = nil // removed in the meantime
	} else {
		spec.Process.Env = nil // it holds secrets
	}
	response.Info, err = encodeInfo(map[string]any{"info": map[string]any{
		"sandboxID": c.SandboxID, "pid": c.Facts().Process.PID, "snapshot": c.ID, "cgroupsPath": c.CgroupsPath, "runtimeSpec": spec,
		"privileged": c.Config().GetLinux().GetSecurityContext().GetPrivileged(),
	}})
	return response, err
}

func containerStatus(c *container.Container) *runtimeapi.ContainerStatus {
	config, facts := c.Config(), c.Facts()
	return &runtimeapi.ContainerStatus{
		Id: c.ID, Metadata: config.GetMetadata(), Labels: config.GetLabels(), Annotations: config.GetAnnotations(),
		State: facts.State(), CreatedAt: c.CreatedAt, StartedAt: facts.StartedAt, FinishedAt: facts.FinishedAt,
		ExitCode: facts.ExitCode, Reason: facts.ExitReason(), Message: facts.Message,
		Image: imageOf(config), ImageRef: c.ImageRef, ImageId: c.ImageID,
		Mounts: c.Mounts(), LogPath: c.LogPath, User: c.User(), StopSignal: c.StopSignalName(),
		Resources: &runtimeapi.ContainerResources{Linux: c.Resources()},
	}
}

// imageOf names the image as the user wrote it, without handler: the kubelet compares it with Image.spec.
func imageOf(config *runtimeapi.ContainerConfig) *runtimeapi.ImageSpec {
	return &runtimeapi.ImageSpec{Image: cmp.Or(config.GetImage().GetUserSpecifiedImage(), config.GetImage().GetImage())}
}

// ListContainers lists the containers that match every field of the filter.
func (r *Runtime) ListContainers(_ context.Context, request *runtimeapi.ListContainersRequest) (*runtimeapi.ListContainersResponse, error) {
	return fit(&runtimeapi.ListContainersResponse{Containers: r.containers(request.GetFilter())}), nil
}

// StreamContainers sends the same list in pieces.
func (r *Runtime) StreamContainers(request *runtimeapi.StreamContainersRequest, stream runtimeapi.RuntimeService_StreamContainersServer) error {
	return sendPieces(r.containers(request.GetFilter()), func(piece []*runtimeapi.Container) error {
		return stream.Send(&runtimeapi.StreamContainersResponse{Containers: piece})
	})
}

func (r *Runtime) containers(filter *runtimeapi.ContainerFilter) []*runtimeapi.Container {
	containers := []*runtimeapi.Container{}
	for _, c := range r.Containers.List() {
		if !containerMatches(c, filter) {
			continue
		}
		config := c.Config()
		containers = append(containers, &runtimeapi.Container{
			Id: c.ID, Metadata: config.GetMetadata(), Labels: config.GetLabels(), Annotations: config.GetAnnotations(),
			PodSandboxId: c.SandboxID, State: c.State(), CreatedAt: c.CreatedAt,
			Image: imageOf(config), ImageRef: c.ImageRef, ImageId: c.ImageID,
		})
	}
	return containers
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
	return &runtimeapi.ExecResponse{Url: url}, err
}

// Attach answers with a URL that attaches to a container, once.
func (r *Runtime) Attach(ctx context.Context, request *runtimeapi.AttachRequest) (*runtimeapi.AttachResponse, error) {
	url, err := r.Streams.Attach(ctx, request)
	return &runtimeapi.AttachResponse{Url: url}, err
}

// PortForward answers with a URL that forwards ports of a pod, for one session.
func (r *Runtime) PortForward(ctx context.Context, request *runtimeapi.PortForwardRequest) (*runtimeapi.PortForwardResponse, error) {
	url, err := r.Streams.PortForward(ctx, request)
	return &runtimeapi.PortForwardResponse{Url: url}, err
}
