package server

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"runtime"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/config"
	"github.com/minicri/minicri/internal/errtext"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/network"
)

// Version names the versions of the kubelet's API, of the runtime and of the CRI.
func (r *Runtime) Version(context.Context, *runtimeapi.VersionRequest) (*runtimeapi.VersionResponse, error) {
	return &runtimeapi.VersionResponse{Version: "0.1.0", RuntimeName: "minicri", RuntimeVersion: r.Info.Version, RuntimeApiVersion: "v1"}, nil
}

// Conditions of our own; other clients ignore them. The last three are there only while false.
const (
	handlerReady          = "RuntimeHandlerReady/"  // and a handler's name: its pods can run; the default has none
	containerSELinuxReady = "ContainerSELinuxReady" // SELinux can confine containers
	olderBuildsServed     = "OlderBuildsServed"     // this daemon can serve the pods of all builds
	cadvisorReady         = "CadvisorReady"         // the kubelet's cAdvisor finds the containers
)

// Status reports whether pods can run. It waits for the state of the network only if there is none yet.
func (r *Runtime) Status(ctx context.Context, request *runtimeapi.StatusRequest) (response *runtimeapi.StatusResponse, err error) {
	status := &runtimeapi.RuntimeStatus{}
	mapsUsers := r.Info.Machine.MapsUsers() == nil
	response = &runtimeapi.StatusResponse{Status: status, Features: &runtimeapi.RuntimeFeatures{
		SupplementalGroupsPolicy: true, MountOptions: true, UserNamespacesHostNetwork: mapsUsers,
	}}
	condition := func(kind, reason, problem string) {
		one := &runtimeapi.RuntimeCondition{Type: kind, Status: problem == ""}
		if problem != "" {
			one.Reason, one.Message = reason, problem
		}
		status.Conditions = append(status.Conditions, one)
	}
	condition(runtimeapi.RuntimeReady, "NoPause", textOf(r.Sandboxes.Ready()))
	condition(runtimeapi.NetworkReady, "NetworkPluginNotReady", textOf(r.Networks.Ready(ctx)))
	if network := status.Conditions[1]; network.Status { // a kubelet reads no message of what holds, but people do
		network.Message = r.Networks.Remark()
	}
	all := r.handlers(ctx)
	for _, h := range all {
		if h.Name != "" {
			condition(handlerReady+h.Name, "RuntimeHandlerNotReady", textOf(h.Err))
		}
		response.RuntimeHandlers = append(response.RuntimeHandlers, &runtimeapi.RuntimeHandler{Name: h.Name, Features: &runtimeapi.RuntimeHandlerFeatures{
			RecursiveReadOnlyMounts: h.Features.RecursiveReadOnlyMounts,
			UserNamespaces:          h.Features.UserNamespaces && mapsUsers,
		}})
	}
	if problem := r.Info.Machine.SELinuxProblem; problem != "" {
		condition(containerSELinuxReady, "NoContainerPolicy", problem)
	}
	if problem := r.unservedBuilds(); problem != "" {
		condition(olderBuildsServed, "UnknownBuild", problem)
	}
	if find := r.Info.ContainerdSocket; find != nil {
		if problem := find(); problem != "" {
			condition(cadvisorReady, "NoContainerdSocket", problem)
		}
	}
	if request.GetVerbose() {
		response.Info, err = r.verboseStatus(ctx, all)
	}
	return response, err
}

func textOf(err error) string {
	if err == nil {
		return ""
	}
	return errtext.Of(err)
}

// handlers lists the handlers. One with a network of its own is ready only if that network is.
func (r *Runtime) handlers(ctx context.Context) []handler.Status {
	limited, cancel := context.WithTimeout(ctx, handler.ListLimit) // the kubelet asks again and again
	defer cancel()
	all := r.Info.Handlers.List(limited)
	for i, h := range all {
		if h.Err != nil || h.CNIConf == "" {
			continue
		}
		if err := r.Networks.In(h.CNIConf).Ready(ctx); err != nil {
			all[i].Err = fmt.Errorf("runtime handler %q: its network: %w", h.Name, err)
		}
	}
	return all
}

func (r *Runtime) unservedBuilds() string {
	older, err := r.Sandboxes.OlderSupervisors()
	var problems []string
	if err != nil {
		problems = append(problems, err.Error())
	}
	for _, one := range older {
		if one.Problem != "" && one.Pods > 0 {
			problems = append(problems, fmt.Sprintf("%d pods: %s", one.Pods, one.Problem))
		}
	}
	return strings.Join(problems, "; ")
}

// verboseStatus shows what a person needs who looks for why pods do not start or do not end.
func (r *Runtime) verboseStatus(ctx context.Context, all []handler.Status) (map[string]string, error) {
	problems, handlers := r.Networks.Problems(), []map[string]any{}
	for _, h := range all {
		described := map[string]any{"name": h.Name, "program": h.Runtime, "features": h.Features, "problem": ""}
		if h.Err != nil {
			described["problem"] = h.Err.Error()
		}
		if h.CNIConf != "" {
			own := r.Networks.In(h.CNIConf)
			problems = slices.Concat(problems, own.Problems())
			described["cni_conf_dir"] = h.CNIConf
			addNetwork(described, own)
		}
		handlers = append(handlers, described)
	}
	pending := []map[string]any{}
	for _, a := range r.Networks.Pending() {
		pending = append(pending, map[string]any{"sandbox": a.ID, "network": a.Network, "tries": a.Tries, "since": a.FirstFailure, "error": a.LastError, "source": a.Source})
	}
	building := []map[string]any{}
	for _, sb := range r.Sandboxes.Building() {
		m := sb.Config().GetMetadata()
		one := map[string]any{"id": sb.ID, "name": m.GetNamespace() + "/" + m.GetName(), "stage": nil}
		if stage := sb.Stage(); stage != nil {
			one["stage"] = withUnits(*stage)[0]
		}
		building = append(building, one)
	}
	info := map[string]any{
		"config": r.Info.Config(), "golang": runtime.Version(), "daemon": map[string]any{"startedAt": r.Info.Started.UTC()},
		"pulls":           r.Images.PullsUnderWay(),
		"handlers":        handlers, // crictl has runtimeHandlers of its own
		"networkProblems": texts(problems), "pendingAttachments": pending, "driftedAttachments": r.Networks.Drifted(),
		"stuckPlugins": r.Networks.Stuck(), "building": building,
		"quarantinedRecords": slices.Concat(r.Sandboxes.Quarantined(), r.Containers.Quarantined(), r.Networks.Quarantined()),
	}
	addNetwork(info, r.Networks.In(""))
	if r.Plugins.Enabled() {
		connected := r.Plugins.Connected()
		info["nriPlugins"], info["nriProblems"] = connected, texts(r.Plugins.Problems(connected))
	}
	if older, err := r.Sandboxes.OlderSupervisors(); err == nil {
		info["olderSupervisors"] = older
	}
	if keys, err := r.Containers.SnapshotsWithoutContainer(ctx); err == nil {
		info["orphanSnapshots"] = keys
	}
	return encodeInfo(info)
}

func addNetwork(to map[string]any, d *network.Directory) {
	if c, err := d.Configuration(); err == nil {
		to["cniconfig"] = map[string]any{"name": c.Name, "file": c.File, "config": json.RawMessage(c.Bytes)}
	}
}

func texts(errs []error) []string {
	list := []string{}
	for _, err := range errs {
		list = append(list, err.Error())
	}
	return list
}

type timed struct {
	step.Row
	Took string `json:"took,omitempty"`
}

func withUnits(rows ...step.Row) []timed {
	list := make([]timed, len(rows))
	for i, row := range rows {
		list[i].Row = row
		if row.Took != 0 {
			list[i].Took = row.Took.String()
		}
	}
	return list
}

// encodeInfo encodes verbose answers. A list becomes an object: crictl would show it as escaped text.
func encodeInfo(values map[string]any) (map[string]string, error) {
	info := make(map[string]string, len(values))
	for key, value := range values {
		if list := reflect.ValueOf(value); list.Kind() == reflect.Slice {
			if list.Len() == 0 {
				value = []any{} // not null
			}
			value = map[string]any{"items": value}
		}
		encoded, err := json.Marshal(value)
		if err != nil {
			return nil, fmt.Errorf("encode %s for the verbose answer: %w", key, err)
		}
		info[key] = string(encoded)
	}
	return info, nil
}

// RuntimeConfig tells the kubelet which cgroup driver to use.
func (r *Runtime) RuntimeConfig(context.Context, *runtimeapi.RuntimeConfigRequest) (*runtimeapi.RuntimeConfigResponse, error) {
	driver := runtimeapi.CgroupDriver_CGROUPFS
	if r.Info.SystemdCgroup {
		driver = runtimeapi.CgroupDriver_SYSTEMD
	}
	return &runtimeapi.RuntimeConfigResponse{Linux: &runtimeapi.LinuxRuntimeConfiguration{CgroupDriver: driver}}, nil
}

// UpdateRuntimeConfig takes the node's pod CIDR for the default network.
func (r *Runtime) UpdateRuntimeConfig(_ context.Context, request *runtimeapi.UpdateRuntimeConfigRequest) (*runtimeapi.UpdateRuntimeConfigResponse, error) {
	cidr := request.GetRuntimeConfig().GetNetworkConfig().GetPodCidr()
	if cidr == "" {
		return &runtimeapi.UpdateRuntimeConfigResponse{}, nil
	}
	if _, err := config.ParseSubnets(cidr); err != nil {
		return nil, fmt.Errorf("runtime_config.network_config.pod_cidr: %w: %w", err, errdefs.ErrInvalidArgument)
	}
	return &runtimeapi.UpdateRuntimeConfigResponse{}, r.Networks.SetPodCIDR(cidr)
}
