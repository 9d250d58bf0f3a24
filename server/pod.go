package server

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"maps"
	"slices"
	"strconv"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/protoadapt"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/sandbox"
)

// RunPodSandbox makes a pod's sandbox.
func (r *Runtime) RunPodSandbox(ctx context.Context, request *runtimeapi.RunPodSandboxRequest) (*runtimeapi.RunPodSandboxResponse, error) {
	id, err := r.Sandboxes.Run(ctx, request.GetConfig(), request.GetRuntimeHandler())
	if err != nil {
		return nil, err
	}
	return &runtimeapi.RunPodSandboxResponse{PodSandboxId: id}, nil
}

// StopPodSandbox ends what runs in the sandbox and detaches it from its network.
func (r *Runtime) StopPodSandbox(ctx context.Context, request *runtimeapi.StopPodSandboxRequest) (*runtimeapi.StopPodSandboxResponse, error) {
	return &runtimeapi.StopPodSandboxResponse{}, r.Sandboxes.Stop(ctx, request.GetPodSandboxId())
}

// RemovePodSandbox removes the sandbox, running or not.
func (r *Runtime) RemovePodSandbox(ctx context.Context, request *runtimeapi.RemovePodSandboxRequest) (*runtimeapi.RemovePodSandboxResponse, error) {
	return &runtimeapi.RemovePodSandboxResponse{}, r.Sandboxes.Remove(ctx, request.GetPodSandboxId())
}

// UpdatePodSandboxResources records the resources that the kubelet has set, for the verbose status.
func (r *Runtime) UpdatePodSandboxResources(ctx context.Context, request *runtimeapi.UpdatePodSandboxResourcesRequest) (*runtimeapi.UpdatePodSandboxResourcesResponse, error) {
	return &runtimeapi.UpdatePodSandboxResourcesResponse{}, r.Sandboxes.UpdateResources(ctx, request.GetPodSandboxId(), request.GetOverhead(), request.GetResources())
}

// PodSandboxStatus describes one sandbox, without waiting for locks or plugins; NotFound if there is none.
func (r *Runtime) PodSandboxStatus(_ context.Context, request *runtimeapi.PodSandboxStatusRequest) (*runtimeapi.PodSandboxStatusResponse, error) {
	sb, err := r.Sandboxes.Find(request.GetPodSandboxId())
	if err != nil {
		return nil, err
	}
	response := &runtimeapi.PodSandboxStatusResponse{Timestamp: r.Events.Time()} // not after what is looked at then
	response.Status, response.ContainersStatuses = r.snapshot(sb)
	response = fit(response)
	if request.GetVerbose() {
		response.Info, err = r.verbosePodStatus(sb)
	}
	return response, err
}

// podStatus has no addresses if their network namespace is gone.
func (r *Runtime) podStatus(sb *sandbox.Sandbox) *runtimeapi.PodSandboxStatus {
	config, network := sb.Config(), &runtimeapi.PodSandboxNetworkStatus{}
	options := cmp.Or(config.GetLinux().GetSecurityContext().GetNamespaceOptions(), &runtimeapi.NamespaceOption{})
	for i, address := range r.Sandboxes.LiveAddresses(sb) {
		if i == 0 {
			network.Ip = address.String()
		} else {
			network.AdditionalIps = append(network.AdditionalIps, &runtimeapi.PodIP{Ip: address.String()})
		}
	}
	return &runtimeapi.PodSandboxStatus{
		Id: sb.ID, Metadata: config.GetMetadata(), Labels: config.GetLabels(), Annotations: config.GetAnnotations(),
		State: podState(sb), CreatedAt: sb.CreatedAt, RuntimeHandler: sb.RuntimeHandler, Network: network,
		Linux: &runtimeapi.LinuxPodSandboxStatus{Namespaces: &runtimeapi.Namespace{Options: options}},
	}
}

func podState(sb *sandbox.Sandbox) runtimeapi.PodSandboxState {
	if sb.Ready() {
		return runtimeapi.PodSandboxState_SANDBOX_READY
	}
	return runtimeapi.PodSandboxState_SANDBOX_NOTREADY
}

func (r *Runtime) verbosePodStatus(sb *sandbox.Sandbox) (map[string]string, error) {
	facts := sb.Facts()
	details := r.Sandboxes.Details(sb)
	resources, err := sb.Resources()
	if err != nil {
		return nil, err
	}
	return encodeInfo(map[string]any{"info": map[string]any{
		"pid": facts.Pause.PID, "netNamespace": details.NetnsPath, "netNamespaceClosed": details.NetnsClosed,
		"runtimeHandler": sb.RuntimeHandler, "cgroupsPath": sb.CgroupsPath, "config": sb.Record.Config,
		"overhead": resources.Overhead, "resources": resources.Resources, "cniResult": facts.CNIResult,
		"runtimeSpec": json.RawMessage(details.RuntimeSpec), "timeline": withUnits(sb.Timeline()...),
	}})
}

// ListPodSandbox lists the sandboxes that match every field of the filter. See fit for long lists.
func (r *Runtime) ListPodSandbox(_ context.Context, request *runtimeapi.ListPodSandboxRequest) (*runtimeapi.ListPodSandboxResponse, error) {
	return fit(&runtimeapi.ListPodSandboxResponse{Items: r.pods(request.GetFilter())}), nil
}

// StreamPodSandboxes sends the same list in pieces.
func (r *Runtime) StreamPodSandboxes(request *runtimeapi.StreamPodSandboxesRequest, stream runtimeapi.RuntimeService_StreamPodSandboxesServer) error {
	return sendPieces(r.pods(request.GetFilter()), func(piece []*runtimeapi.PodSandbox) error {
		return stream.Send(&runtimeapi.StreamPodSandboxesResponse{PodSandboxes: piece})
	})
}

func (r *Runtime) pods(filter *runtimeapi.PodSandboxFilter) []*runtimeapi.PodSandbox {
	pods := []*runtimeapi.PodSandbox{}
	for _, sb := range r.Sandboxes.List() {
		if !podMatches(sb, filter) {
			continue
		}
		config := sb.Config()
		pods = append(pods, &runtimeapi.PodSandbox{
			Id: sb.ID, Metadata: config.GetMetadata(), Labels: config.GetLabels(), Annotations: config.GetAnnotations(),
			State: podState(sb), CreatedAt: sb.CreatedAt, RuntimeHandler: sb.RuntimeHandler,
		})
	}
	return pods
}

// snapshot returns the statuses of a pod and its containers at one moment, without a lock. Facts are
// replaced, never changed: if they are the same before and after, nothing changed in between.
func (r *Runtime) snapshot(sb *sandbox.Sandbox) (*runtimeapi.PodSandboxStatus, []*runtimeapi.ContainerStatus) {
	for {
		before := r.factsOf(sb)
		pod := r.podStatus(sb)
		containers := []*runtimeapi.ContainerStatus{}
		for _, c := range r.Containers.ListPod(sb.ID) {
			containers = append(containers, containerStatus(c))
		}
		if slices.Equal(before, r.factsOf(sb)) {
			return pod, containers
		}
	}
}

func (r *Runtime) factsOf(sb *sandbox.Sandbox) []any {
	facts := []any{sb.Facts()}
	for _, c := range r.Containers.ListPod(sb.ID) {
		facts = append(facts, c, c.Facts())
	}
	return facts
}

// withDetails adds to a status error, in fields, what its message says: ErrorInfo has the step and, if a CNI
// plugin failed, what it reported; DebugInfo has the end of its stderr.
func withDetails(code codes.Code, text string, err error) error {
	info := &errdetails.ErrorInfo{Domain: "minicri", Reason: "STEP_FAILED", Metadata: make(map[string]string)}
	details := []protoadapt.MessageV1{info}
	if failed, is := errors.AsType[*step.Error](err); is {
		info.Metadata["step"] = string(failed.Step)
	}
	if e, is := errors.AsType[*network.PluginError](err); is {
		info.Reason = "CNI_PLUGIN_FAILED"
		maps.Copy(info.Metadata, map[string]string{"network": e.Network, "plugin": e.Name, "verb": e.Verb, "cni_message": e.Message, "advice": e.Advice})
		if e.Code != 0 {
			info.Metadata["cni_code"] = strconv.FormatUint(uint64(e.Code), 10)
		}
		if e.Stderr != "" {
			details = append(details, &errdetails.DebugInfo{Detail: e.Stderr})
		}
	}
	maps.DeleteFunc(info.Metadata, func(_, value string) bool { return value == "" })
	result := status.New(code, text)
	if detailed, err := result.WithDetails(details...); err == nil && len(info.Metadata) > 0 {
		result = detailed
	}
	return result.Err()
}
