package server

import (
	"context"
	"path/filepath"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/stats"
)

// ContainerStats measures one container; NotFound when there is none.
func (r *Runtime) ContainerStats(ctx context.Context, request *runtimeapi.ContainerStatsRequest) (*runtimeapi.ContainerStatsResponse, error) {
	c, err := r.Containers.Find(request.GetContainerId())
	if err != nil {
		return nil, err
	}
	measured, err := r.Stats.Container(ctx, measurable(c))
	return &runtimeapi.ContainerStatsResponse{Stats: measured}, err
}

// ListContainerStats measures the running containers that match the filter.
func (r *Runtime) ListContainerStats(ctx context.Context, request *runtimeapi.ListContainerStatsRequest) (*runtimeapi.ListContainerStatsResponse, error) {
	return fit(&runtimeapi.ListContainerStatsResponse{Stats: r.containerStats(ctx, request.GetFilter())}), nil
}

// StreamContainerStats sends the same list in pieces.
func (r *Runtime) StreamContainerStats(request *runtimeapi.StreamContainerStatsRequest, stream runtimeapi.RuntimeService_StreamContainerStatsServer) error {
	return sendPieces(r.containerStats(stream.Context(), request.GetFilter()), func(piece []*runtimeapi.ContainerStats) error {
		return stream.Send(&runtimeapi.StreamContainerStatsResponse{ContainerStats: piece})
	})
}

func (r *Runtime) containerStats(ctx context.Context, filter *runtimeapi.ContainerStatsFilter) []*runtimeapi.ContainerStats {
	same := &runtimeapi.ContainerFilter{
		Id: filter.GetId(), PodSandboxId: filter.GetPodSandboxId(), LabelSelector: filter.GetLabelSelector(),
		State: &runtimeapi.ContainerStateValue{State: runtimeapi.ContainerState_CONTAINER_RUNNING},
	}
	var running []stats.Container
	for _, c := range r.Containers.List() {
		if containerMatches(c, same) {
			running = append(running, measurable(c))
		}
	}
	return r.Stats.Containers(ctx, running)
}

func measurable(c *container.Container) stats.Container {
	config := c.Config()
	return stats.Container{
		ID: c.ID, Cgroup: cgroup.Path(c.CgroupsPath), Resources: c.Resources(),
		Image: imageOf(config).GetImage(), StartedAt: c.Facts().StartedAt,
		Attributes: &runtimeapi.ContainerAttributes{
			Id: c.ID, Metadata: config.GetMetadata(), Labels: config.GetLabels(), Annotations: config.GetAnnotations(),
		},
	}
}

// PodSandboxStats measures one pod; NotFound when there is none.
func (r *Runtime) PodSandboxStats(ctx context.Context, request *runtimeapi.PodSandboxStatsRequest) (*runtimeapi.PodSandboxStatsResponse, error) {
	sb, err := r.Sandboxes.Find(request.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	measured, err := r.Stats.Pod(ctx, r.measurablePod(sb))
	return &runtimeapi.PodSandboxStatsResponse{Stats: measured}, err
}

// ListPodSandboxStats measures the ready pods that match the filter.
func (r *Runtime) ListPodSandboxStats(ctx context.Context, request *runtimeapi.ListPodSandboxStatsRequest) (*runtimeapi.ListPodSandboxStatsResponse, error) {
	return fit(&runtimeapi.ListPodSandboxStatsResponse{Stats: r.podStats(ctx, request.GetFilter())}), nil
}

// StreamPodSandboxStats sends the same list in pieces.
func (r *Runtime) StreamPodSandboxStats(request *runtimeapi.StreamPodSandboxStatsRequest, stream runtimeapi.RuntimeService_StreamPodSandboxStatsServer) error {
	return sendPieces(r.podStats(stream.Context(), request.GetFilter()), func(piece []*runtimeapi.PodSandboxStats) error {
		return stream.Send(&runtimeapi.StreamPodSandboxStatsResponse{PodSandboxStats: piece})
	})
}

func (r *Runtime) podStats(ctx context.Context, filter *runtimeapi.PodSandboxStatsFilter) []*runtimeapi.PodSandboxStats {
	return r.Stats.Pods(ctx, r.measurablePods(&runtimeapi.PodSandboxFilter{Id: filter.GetId(), LabelSelector: filter.GetLabelSelector()}))
}

// MeasurePods measures all pods that are ready.
func (r *Runtime) MeasurePods(ctx context.Context) []*runtimeapi.PodSandboxStats {
	return r.Stats.Pods(ctx, r.measurablePods(nil))
}

// MeasureForMetrics measures all pods that are ready, as ListPodSandboxMetrics does.
func (r *Runtime) MeasureForMetrics() []*runtimeapi.PodSandboxMetrics {
	return r.Stats.Metrics(context.Background(), r.measurablePods(nil))
}

func (r *Runtime) measurablePods(filter *runtimeapi.PodSandboxFilter) []stats.Pod {
	var pods []stats.Pod
	for _, sb := range r.Sandboxes.List() {
		if sb.Ready() && podMatches(sb, filter) {
			pods = append(pods, r.measurablePod(sb))
		}
	}
	return pods
}

func (r *Runtime) measurablePod(sb *sandbox.Sandbox) stats.Pod {
	config := sb.Config()
	pod := stats.Pod{
		ID: sb.ID, Netns: r.Sandboxes.NetnsPath(sb),
		Attributes: &runtimeapi.PodSandboxAttributes{
			Id: sb.ID, Metadata: config.GetMetadata(), Labels: config.GetLabels(), Annotations: config.GetAnnotations(),
		},
	}
	for _, c := range r.Containers.ListPod(sb.ID) {
		if c.State() == runtimeapi.ContainerState_CONTAINER_RUNNING {
			pod.Containers = append(pod.Containers, measurable(c))
		}
	}
	// The kubelet makes a parent for each pod. Without one, the pod is the sum of its parts.
	pause := cgroup.Path(sb.CgroupsPath)
	if config.GetLinux().GetCgroupParent() != "" {
		pod.Cgroups = []string{filepath.Dir(pause)}
		return pod
	}
	pod.Cgroups = []string{pause}
	for _, c := range pod.Containers {
		pod.Cgroups = append(pod.Cgroups, c.Cgroup)
	}
	return pod
}

// ListMetricDescriptors names the metrics that ListPodSandboxMetrics gives.
func (r *Runtime) ListMetricDescriptors(context.Context, *runtimeapi.ListMetricDescriptorsRequest) (*runtimeapi.ListMetricDescriptorsResponse, error) {
	return &runtimeapi.ListMetricDescriptorsResponse{Descriptors: stats.Descriptors()}, nil
}

// ListPodSandboxMetrics measures the pods that are ready, and their containers.
func (r *Runtime) ListPodSandboxMetrics(ctx context.Context, _ *runtimeapi.ListPodSandboxMetricsRequest) (*runtimeapi.ListPodSandboxMetricsResponse, error) {
	return &runtimeapi.ListPodSandboxMetricsResponse{PodMetrics: fitMetrics(r.Stats.Metrics(ctx, r.measurablePods(nil)))}, nil
}

// StreamPodSandboxMetrics sends the same list in pieces.
func (r *Runtime) StreamPodSandboxMetrics(_ *runtimeapi.StreamPodSandboxMetricsRequest, stream runtimeapi.RuntimeService_StreamPodSandboxMetricsServer) error {
	return sendPieces(r.Stats.Metrics(stream.Context(), r.measurablePods(nil)), func(piece []*runtimeapi.PodSandboxMetrics) error {
		return stream.Send(&runtimeapi.StreamPodSandboxMetricsResponse{PodSandboxMetrics: piece})
	})
}
