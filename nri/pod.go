package nri

import (
	"context"
	"fmt"
	"path"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"google.golang.org/protobuf/encoding/protojson"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/sandbox"
)

// RunPod implements sandbox.Plugins.
func (p *Plugins) RunPod(ctx context.Context, sb *sandbox.Sandbox) error {
	if !p.Enabled() {
		return nil
	}
	pod := p.pod(sb)
	if err := p.checkRequired(pod, ""); err != nil {
		return err
	}
	_, err := p.request(ctx, func(d *door) { d.podsMade[sb.ID] = sb }, func(a *adaptation.Adaptation) error {
		return a.RunPodSandbox(ctx, &adaptation.RunPodSandboxRequest{Pod: pod})
	})
	return err
}

// UpdatePod implements sandbox.Plugins.
func (p *Plugins) UpdatePod(ctx context.Context, sb *sandbox.Sandbox, overhead, resources *runtimeapi.LinuxContainerResources) error {
	return p.notify(ctx, func(a *adaptation.Adaptation) error {
		_, err := a.UpdatePodSandbox(ctx, &adaptation.UpdatePodSandboxRequest{
			Pod: p.pod(sb), OverheadLinuxResources: fromCRI(overhead), LinuxResources: fromCRI(resources),
		})
		return err
	})
}

// UpdatedPod implements sandbox.Plugins.
func (p *Plugins) UpdatedPod(ctx context.Context, sb *sandbox.Sandbox) error {
	return p.notify(ctx, func(a *adaptation.Adaptation) error {
		return a.PostUpdatePodSandbox(ctx, &adaptation.PostUpdatePodSandboxRequest{Pod: p.pod(sb)})
	})
}

// StopPod implements sandbox.Plugins.
func (p *Plugins) StopPod(ctx context.Context, sb *sandbox.Sandbox) error {
	return p.notify(ctx, func(a *adaptation.Adaptation) error {
		return a.StopPodSandbox(ctx, &adaptation.StopPodSandboxRequest{Pod: p.pod(sb)})
	})
}

// RemovePod implements sandbox.Plugins.
func (p *Plugins) RemovePod(ctx context.Context, sb *sandbox.Sandbox) error {
	_, err := p.request(ctx, func(d *door) { delete(d.podsMade, sb.ID) }, func(a *adaptation.Adaptation) error {
		return a.RemovePodSandbox(ctx, &adaptation.RemovePodSandboxRequest{Pod: p.pod(sb)})
	})
	return err
}

func (p *Plugins) pod(sb *sandbox.Sandbox) *api.PodSandbox {
	config, facts := sb.Config(), sb.Facts()
	m := config.GetMetadata()
	pod := &api.PodSandbox{
		Id: sb.ID, Name: m.GetName(), Uid: m.GetUid(), Namespace: m.GetNamespace(),
		Labels: config.GetLabels(), Annotations: config.GetAnnotations(), RuntimeHandler: sb.RuntimeHandler,
		Pid: uint32(facts.Pause.PID),
		Linux: &api.LinuxPodSandbox{
			CgroupParent: config.GetLinux().GetCgroupParent(), CgroupsPath: sb.CgroupsPath, Namespaces: p.namespaces(sb),
		},
	}
	for _, address := range facts.Addresses {
		pod.Ips = append(pod.Ips, address.String())
	}
	if resources, err := sb.Resources(); err == nil {
		pod.Linux.PodOverhead, pod.Linux.PodResources = decodeCRI(resources.Overhead), decodeCRI(resources.Resources)
	}
	return pod
}

func decodeCRI(encoded []byte) *api.LinuxResources {
	resources := &runtimeapi.LinuxContainerResources{}
	if len(encoded) == 0 || protojson.Unmarshal(encoded, resources) != nil {
		return nil
	}
	return fromCRI(resources)
}

// namespaces lists those that the pod does not share with the node, some only while its pause runs.
func (p *Plugins) namespaces(sb *sandbox.Sandbox) (list []*api.LinuxNamespace) {
	add := func(kind, path string) { list = append(list, &api.LinuxNamespace{Type: kind, Path: path}) }
	if path := p.pods.NetnsPath(sb); path != "" {
		add("network", path)
	}
	if path := p.pods.UsernsPath(sb); path != "" {
		add("user", path)
	}
	facts := sb.Facts()
	pid := facts.Pause.PID
	if pid == 0 || !facts.ExitedAt.IsZero() || !facts.StoppedAt.IsZero() {
		return list
	}
	options := sb.Config().GetLinux().GetSecurityContext().GetNamespaceOptions()
	for _, one := range []struct {
		kind, file string
		mode       runtimeapi.NamespaceMode
	}{
		{"ipc", "ipc", options.GetIpc()},
		{"pid", "pid", options.GetPid()},
		{"uts", "uts", options.GetNetwork()},
		{"mount", "mnt", runtimeapi.NamespaceMode_POD},
	} {
		if one.mode != runtimeapi.NamespaceMode_NODE {
			add(one.kind, path.Join("/proc", fmt.Sprint(pid), "ns", one.file))
		}
	}
	return list
}
