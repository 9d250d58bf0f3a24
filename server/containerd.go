package server

import (
	"context"
	"fmt"

	containers "github.com/containerd/containerd/api/services/containers/v1"
	tasks "github.com/containerd/containerd/api/services/tasks/v1"
	"github.com/containerd/containerd/api/services/version/v1"
	"github.com/containerd/containerd/api/types/task"
	"github.com/containerd/errdefs"
	"google.golang.org/grpc"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
	"google.golang.org/protobuf/types/known/timestamppb"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/sandbox"
)

// The kubelet's cAdvisor takes the containers of a cgroup from containerd or from CRI-O, and from no other runtime.
// So minicri answers the three calls that cAdvisor makes of containerd (google/cadvisor, lib/container/containerd):
// without them a kubelet's /metrics/cadvisor has no series of a container. All other calls are Unimplemented.
//
// cAdvisor asks for every cgroup with 64 digits in its name, one after the other, while the kubelet starts. So an
// unknown id is answered at once.
type (
	containerdVersion struct {
		version.UnimplementedVersionServer
		runtime *Runtime
	}
	containerdContainers struct {
		containers.UnimplementedContainersServer
		runtime *Runtime
	}
	containerdTasks struct {
		tasks.UnimplementedTasksServer
		runtime *Runtime
	}
)

func registerContainerd(server *grpc.Server, runtime *Runtime) {
	version.RegisterVersionServer(server, &containerdVersion{runtime: runtime})
	containers.RegisterContainersServer(server, &containerdContainers{runtime: runtime})
	tasks.RegisterTasksServer(server, &containerdTasks{runtime: runtime})
}

// pauseImage is the image of pods: queries of dashboards leave out series without an image.
const pauseImage = "minicri/pause"

// kindLabel is how containerd's CRI plugin marks its objects: cAdvisor reads the network of a sandbox only.
const kindLabel = "io.cri-containerd.kind"

// Version returns the version of minicri.
func (v *containerdVersion) Version(context.Context, *emptypb.Empty) (*version.VersionResponse, error) {
	return &version.VersionResponse{Version: "minicri " + v.runtime.Info.Version}, nil
}

// Get describes a container or a pod sandbox by its whole id. A container has a record before it has a cgroup, so
// cAdvisor finds it also while it is created.
func (s *containerdContainers) Get(
	_ context.Context, request *containers.GetContainerRequest,
) (*containers.GetContainerResponse, error) {
	object, err := s.runtime.containerdObject(request.GetID())
	if err != nil {
		return nil, err
	}
	labels := map[string]string{kindLabel: object.kind}
	for key, value := range object.labels {
		labels[key] = value
	}
	return &containers.GetContainerResponse{Container: &containers.Container{
		ID: request.GetID(), Labels: labels, Image: object.image,
		// cAdvisor decodes the spec and reads the environment that the kubelet allows, which is none.
		Spec: &anypb.Any{
			TypeUrl: "types.containerd.io/opencontainers/runtime-spec/1/Spec", Value: []byte(`{"process":{}}`),
		},
		CreatedAt: &timestamppb.Timestamp{Seconds: object.created / 1e9, Nanos: int32(object.created % 1e9)},
	}}, nil
}

// Get returns the first process of a container or a pod sandbox. While there is none, cAdvisor repeats the call.
func (s *containerdTasks) Get(_ context.Context, request *tasks.GetRequest) (*tasks.GetResponse, error) {
	object, err := s.runtime.containerdObject(request.GetContainerID())
	if err != nil {
		return nil, err
	}
	if object.process.PID == 0 {
		return nil, fmt.Errorf("process of %s %s: %w", object.kind, request.GetContainerID(), errdefs.ErrNotFound)
	}
	return &tasks.GetResponse{Process: &task.Process{
		ID: request.GetContainerID(), Pid: uint32(object.process.PID), Status: object.status, ExitStatus: object.exit,
	}}, nil
}

// containerdObject is a container or a pod sandbox as cAdvisor reads it.
type containerdObject struct {
	kind, image string
	labels      map[string]string
	created     int64 // in nanoseconds since 1970
	process     process.Facts
	status      task.Status
	exit        uint32 // of a container that has ended: cAdvisor reports it with the end
}

func (r *Runtime) containerdObject(id string) (containerdObject, error) {
	if c, is := r.Containers.Get(id); is {
		return r.containerdContainer(c), nil
	}
	if sb, is := r.Sandboxes.Get(id); is {
		return containerdSandbox(sb), nil
	}
	return containerdObject{}, fmt.Errorf("container %q: %w", id, errdefs.ErrNotFound)
}

func (r *Runtime) containerdContainer(c *container.Container) containerdObject {
	facts := c.Facts()
	object := containerdObject{
		kind: "container", image: c.ImageRef, labels: c.Config().GetLabels(), created: c.CreatedAt,
		process: facts.Process, status: task.Status_RUNNING, exit: uint32(facts.ExitCode),
	}
	if image, err := r.Images.Get(c.ImageID); err == nil && len(image.RepoTags) > 0 {
		object.image = image.RepoTags[0]
	}
	switch c.State() {
	case runtimeapi.ContainerState_CONTAINER_CREATED:
		object.status = task.Status_CREATED
	case runtimeapi.ContainerState_CONTAINER_EXITED:
		object.status = task.Status_STOPPED
	}
	return object
}

func containerdSandbox(sb *sandbox.Sandbox) containerdObject {
	object := containerdObject{
		kind: "sandbox", image: pauseImage, labels: sb.Config().GetLabels(),
		created: sb.CreatedAt, process: sb.Facts().Pause, status: task.Status_RUNNING,
	}
	if !sb.Ready() {
		object.status = task.Status_STOPPED
	}
	return object
}
