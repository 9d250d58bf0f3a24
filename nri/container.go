package nri

import (
	"cmp"
	"context"
	"maps"
	"strings"

	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
)

var _ container.Plugins = (*Plugins)(nil)

// Created implements container.Plugins.
func (p *Plugins) Created(ctx context.Context, pod *sandbox.Sandbox, c *container.Container) error {
	return p.notify(ctx, func(a *adaptation.Adaptation) error {
		return a.PostCreateContainer(ctx, &adaptation.PostCreateContainerRequest{Pod: p.pod(pod), Container: p.container(c)})
	})
}

// Start implements container.Plugins.
func (p *Plugins) Start(ctx context.Context, pod *sandbox.Sandbox, c *container.Container) error {
	_, err := p.request(ctx, forget(c), func(a *adaptation.Adaptation) error {
		return a.StartContainer(ctx, &adaptation.StartContainerRequest{Pod: p.pod(pod), Container: p.container(c)})
	})
	return err
}

// Started implements container.Plugins.
func (p *Plugins) Started(ctx context.Context, pod *sandbox.Sandbox, c *container.Container) error {
	return p.notify(ctx, func(a *adaptation.Adaptation) error {
		return a.PostStartContainer(ctx, &adaptation.PostStartContainerRequest{Pod: p.pod(pod), Container: p.container(c)})
	})
}

// Updated implements container.Plugins.
func (p *Plugins) Updated(ctx context.Context, pod *sandbox.Sandbox, c *container.Container) error {
	return p.notify(ctx, func(a *adaptation.Adaptation) error {
		return a.PostUpdateContainer(ctx, &adaptation.PostUpdateContainerRequest{Pod: p.pod(pod), Container: p.container(c)})
	})
}

// Stop implements container.Plugins.
func (p *Plugins) Stop(ctx context.Context, pod *sandbox.Sandbox, c *container.Container) ([]container.Change, error) {
	var answer *adaptation.StopContainerResponse
	updaters, err := p.request(ctx, forget(c), func(a *adaptation.Adaptation) (err error) {
		answer, err = a.StopContainer(ctx, &adaptation.StopContainerRequest{Pod: p.pod(pod), Container: p.container(c)})
		return err
	})
	if err != nil {
		return nil, err
	}
	return p.changes(updaters, answer.GetUpdate()), nil
}

// Remove implements container.Plugins.
func (p *Plugins) Remove(ctx context.Context, pod *sandbox.Sandbox, c *container.Container) error {
	_, err := p.request(ctx, forget(c), func(a *adaptation.Adaptation) error {
		return a.RemoveContainer(ctx, &adaptation.RemoveContainerRequest{Pod: p.pod(pod), Container: p.container(c)})
	})
	return err
}

// forget drops what was noted of a container that is listed, or gone.
func forget(c *container.Container) func(*door) {
	return func(d *door) { delete(d.containersMade, c.ID) }
}

// container is a container that was made, as NRI sees it. Its spec may be gone,
// or have lost its environment, when it has ended.
func (p *Plugins) container(c *container.Container) *api.Container {
	spec, err := p.containers.Spec(c)
	if err != nil {
		spec = &specs.Spec{}
	}
	message := newContainer(c, spec)
	facts := c.Facts()
	message.Pid = uint32(facts.Process.PID)
	message.State = states[facts.State()]
	message.CreatedAt, message.StartedAt, message.FinishedAt = c.CreatedAt, facts.StartedAt, facts.FinishedAt
	message.ExitCode, message.StatusReason, message.StatusMessage = facts.ExitCode, facts.ExitReason(), facts.Message
	if resources := fromCRI(c.Resources()); resources != nil && message.Linux.Resources != nil {
		// What is in force, after updates.
		resources.Devices, resources.Pids = message.Linux.Resources.Devices, message.Linux.Resources.Pids
		message.Linux.Resources = resources
	}
	return message
}

// states are those of NRI; all others are unknown.
var states = map[runtimeapi.ContainerState]api.ContainerState{
	runtimeapi.ContainerState_CONTAINER_CREATED: api.ContainerState_CONTAINER_CREATED,
	runtimeapi.ContainerState_CONTAINER_RUNNING: api.ContainerState_CONTAINER_RUNNING,
	runtimeapi.ContainerState_CONTAINER_EXITED:  api.ContainerState_CONTAINER_STOPPED,
}

// newContainer is a container with the spec, before anything is known of its
// processes.
func newContainer(c *container.Container, spec *specs.Spec) *api.Container {
	config := c.Config()
	message := &api.Container{
		Id: c.ID, PodSandboxId: c.SandboxID, Name: config.GetMetadata().GetName(), State: api.ContainerState_CONTAINER_CREATED,
		Labels: maps.Clone(config.GetLabels()), Annotations: maps.Clone(config.GetAnnotations()),
		Mounts: api.FromOCIMounts(spec.Mounts), Hooks: api.FromOCIHooks(spec.Hooks), Linux: &api.LinuxContainer{},
		CreatedAt: c.CreatedAt, Image: imageOf(config.GetImage(), c.ImageRef, c.ImageTarget, c.ImageID),
	}
	if message.Annotations == nil {
		message.Annotations = make(map[string]string)
	}
	maps.Copy(message.Annotations, spec.Annotations)
	for _, device := range config.GetCDIDevices() {
		message.CDIDevices = append(message.CDIDevices, &api.CDIDevice{Name: device.GetName()})
	}
	if process := spec.Process; process != nil {
		message.Args = append([]string(nil), process.Args...)
		for _, variable := range process.Env {
			message.Env = append(message.Env, strings.ToValidUTF8(variable, "\uFFFD")) // messages have no other text
		}
		for _, limit := range process.Rlimits {
			message.Rlimits = append(message.Rlimits, &api.POSIXRlimit{Type: limit.Type, Hard: limit.Hard, Soft: limit.Soft})
		}
		message.User = &api.User{Uid: process.User.UID, Gid: process.User.GID, AdditionalGids: process.User.AdditionalGids}
		message.Linux.OomScoreAdj = api.Int(process.OOMScoreAdj)
		message.Linux.IoPriority = api.FromOCILinuxIOPriority(process.IOPriority)
		message.Linux.Scheduler = api.FromOCILinuxScheduler(process.Scheduler)
	}
	if linux := spec.Linux; linux != nil {
		fillLinux(message.Linux, linux)
	}
	message.Linux.SeccompProfile = seccompProfile(config.GetLinux().GetSecurityContext())
	return message
}

// imageOf has the name that the user wrote, and the digest of the image's manifest or
// index: that of the reference that it was found by, which is NAME@DIGEST, or of what was
// imported.
func imageOf(image *runtimeapi.ImageSpec, reference, target, id string) *api.Image {
	_, digest, _ := strings.Cut(reference, "@")
	return &api.Image{Name: cmp.Or(image.GetUserSpecifiedImage(), image.GetImage()), Digest: cmp.Or(digest, target), ConfigDigest: id}
}

func fillLinux(to *api.LinuxContainer, linux *specs.Linux) {
	to.Namespaces = api.FromOCILinuxNamespaces(linux.Namespaces)
	to.Devices = api.FromOCILinuxDevices(linux.Devices)
	to.Resources = api.FromOCILinuxResources(linux.Resources, nil)
	to.CgroupsPath = linux.CgroupsPath
	to.Sysctl = maps.Clone(linux.Sysctl)
	to.NetDevices = api.FromOCILinuxNetDevices(linux.NetDevices)
	if linux.Seccomp != nil {
		to.SeccompPolicy = api.FromOCILinuxSeccomp(linux.Seccomp)
	}
	if rdt := linux.IntelRdt; rdt != nil {
		to.Rdt = &api.LinuxRdt{ClosId: api.String(rdt.ClosID), Schemata: api.RepeatedString(rdt.Schemata), EnableMonitoring: api.Bool(rdt.EnableMonitoring)}
	}
}

func seccompProfile(security *runtimeapi.LinuxContainerSecurityContext) *api.SecurityProfile {
	profile := security.GetSeccomp()
	if profile == nil || security.GetPrivileged() {
		return &api.SecurityProfile{ProfileType: api.SecurityProfile_UNCONFINED}
	}
	return &api.SecurityProfile{ProfileType: api.SecurityProfile_ProfileType(profile.GetProfileType()), LocalhostRef: profile.GetLocalhostRef()}
}
