package nri

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/runtime-tools/generate"
	"github.com/opencontainers/runtime-spec/specs-go"
	ocigenerate "github.com/opencontainers/runtime-tools/generate"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
)

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

func forget(c *container.Container) func(*door) {
	return func(d *door) { delete(d.containersMade, c.ID) }
}

// container describes a created container to NRI. The spec of an exited one may be gone.
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
		resources.Devices, resources.Pids = message.Linux.Resources.Devices, message.Linux.Resources.Pids
		message.Linux.Resources = resources
	}
	return message
}

var states = map[runtimeapi.ContainerState]api.ContainerState{
	runtimeapi.ContainerState_CONTAINER_CREATED: api.ContainerState_CONTAINER_CREATED,
	runtimeapi.ContainerState_CONTAINER_RUNNING: api.ContainerState_CONTAINER_RUNNING,
	runtimeapi.ContainerState_CONTAINER_EXITED:  api.ContainerState_CONTAINER_STOPPED,
}

// newContainer describes a container without the state of its processes.
func newContainer(c *container.Container, spec *specs.Spec) *api.Container {
	config := c.Config()
	message := &api.Container{
		Id: c.ID, PodSandboxId: c.SandboxID, Name: config.GetMetadata().GetName(), State: api.ContainerState_CONTAINER_CREATED,
		Labels: maps.Clone(config.GetLabels()), Annotations: make(map[string]string),
		Mounts: api.FromOCIMounts(spec.Mounts), Hooks: api.FromOCIHooks(spec.Hooks), Linux: &api.LinuxContainer{},
		CreatedAt: c.CreatedAt, Image: imageOf(config.GetImage(), c.ImageRef, c.ImageTarget, c.ImageID),
	}
	maps.Copy(message.Annotations, config.GetAnnotations())
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
		message.Linux.Namespaces = api.FromOCILinuxNamespaces(linux.Namespaces)
		message.Linux.Devices = api.FromOCILinuxDevices(linux.Devices)
		message.Linux.Resources = api.FromOCILinuxResources(linux.Resources, nil)
		message.Linux.CgroupsPath = linux.CgroupsPath
		message.Linux.Sysctl = maps.Clone(linux.Sysctl)
		message.Linux.NetDevices = api.FromOCILinuxNetDevices(linux.NetDevices)
		if linux.Seccomp != nil {
			message.Linux.SeccompPolicy = api.FromOCILinuxSeccomp(linux.Seccomp)
		}
		if rdt := linux.IntelRdt; rdt != nil {
			message.Linux.Rdt = &api.LinuxRdt{
				ClosId: api.String(rdt.ClosID), Schemata: api.RepeatedString(rdt.Schemata), EnableMonitoring: api.Bool(rdt.EnableMonitoring),
			}
		}
	}
	security := config.GetLinux().GetSecurityContext()
	message.Linux.SeccompProfile = &api.SecurityProfile{ProfileType: api.SecurityProfile_UNCONFINED}
	if profile := security.GetSeccomp(); profile != nil && !security.GetPrivileged() {
		message.Linux.SeccompProfile.ProfileType = api.SecurityProfile_ProfileType(profile.GetProfileType())
		message.Linux.SeccompProfile.LocalhostRef = profile.GetLocalhostRef()
	}
	return message
}

// imageOf returns the user's name, and the manifest's digest, from the reference or the import.
func imageOf(image *runtimeapi.ImageSpec, reference, target, id string) *api.Image {
	_, digest, _ := strings.Cut(reference, "@")
	return &api.Image{Name: cmp.Or(image.GetUserSpecifiedImage(), image.GetImage()), Digest: cmp.Or(digest, target), ConfigDigest: id}
}

// Create implements container.Plugins.
func (p *Plugins) Create(ctx context.Context, pod *sandbox.Sandbox, c *container.Container, spec *specs.Spec, inject container.Inject) ([]container.Change, error) {
	if !p.Enabled() {
		return nil, nil
	}
	request := &adaptation.CreateContainerRequest{Pod: p.pod(pod), Container: newContainer(c, spec)}
	if err := p.checkRequired(request.GetPod(), request.GetContainer().GetName()); err != nil {
		return nil, err
	}
	noted := proto.CloneOf(request.Container) // the library changes the other one
	var answer *adaptation.CreateContainerResponse
	// A pod may name plugins that it needs in an annotation, which the validator checks.
	updaters, err := p.validate(ctx, func(d *door) {
		delete(d.podsMade, pod.ID) // it is listed
		d.containersMade[noted.GetId()] = noted
	}, func(a *adaptation.Adaptation) (err error) {
		answer, err = a.CreateContainer(ctx, request)
		return err
	})
	if err != nil {
		return nil, err
	}
	removeFrom(spec, noted, request.GetContainer())
	if err := adjust(spec, answer.GetAdjust(), inject); err != nil {
		return nil, fmt.Errorf("adjust the container as NRI plugins want: %w: %w", errdefs.ErrInvalidArgument, err)
	}
	return p.changes(updaters, answer.GetUpdate()), nil
}

// removeFrom removes what plugins have removed: variables and devices. The library leaves them
// out of its answer, and removes them only in the container that it shows the next plugin.
func removeFrom(spec *specs.Spec, before, after *api.Container) {
	gone := func(variable string) bool {
		name, _, _ := strings.Cut(variable, "=")
		is := func(v string) bool { return v == name || strings.HasPrefix(v, name+"=") }
		return slices.ContainsFunc(before.GetEnv(), is) && !slices.ContainsFunc(after.GetEnv(), is)
	}
	spec.Process.Env = slices.DeleteFunc(spec.Process.Env, gone)
	spec.Linux.Devices = slices.DeleteFunc(spec.Linux.Devices, func(device specs.LinuxDevice) bool {
		is := func(d *api.LinuxDevice) bool { return d.GetPath() == device.Path }
		return slices.ContainsFunc(before.GetLinux().GetDevices(), is) && !slices.ContainsFunc(after.GetLinux().GetDevices(), is)
	})
}

// adjust changes a spec. The library's generator does most of it.
func adjust(spec *specs.Spec, wanted *api.ContainerAdjustment, inject container.Inject) error {
	if class := wanted.GetLinux().GetResources().GetBlockioClass(); class.GetValue() != "" {
		return fmt.Errorf("block I/O class %q: this runtime has no classes", class.GetValue())
	}
	if class := wanted.GetLinux().GetResources().GetRdtClass(); class.GetValue() != "" {
		return fmt.Errorf("RDT class %q: this runtime has no classes, only closids (linux.rdt)", class.GetValue())
	}
	ociGenerator := ocigenerate.NewFromSpec(spec)
	generator := generate.SpecGenerator(&ociGenerator, generate.WithCDIDeviceInjector(inject))
	if err := generator.Adjust(wanted); err != nil {
		return err
	}
	return adjustMemory(spec, wanted.GetLinux().GetResources().GetMemory())
}

// adjustMemory does what the generator leaves out: all but the limit.
func adjustMemory(spec *specs.Spec, wanted *api.LinuxMemory) error {
	if wanted == nil {
		return nil
	}
	memory := (&api.LinuxResources{Memory: wanted}).ToOCI().Memory
	memory.Limit, memory.Kernel, memory.KernelTCP = nil, nil, nil
	encoded, err := json.Marshal(memory) // what is not wanted is not in it
	if err != nil {
		return err
	}
	spec.Linux.Resources = cmp.Or(spec.Linux.Resources, &specs.LinuxResources{})
	spec.Linux.Resources.Memory = cmp.Or(spec.Linux.Resources.Memory, &specs.LinuxMemory{})
	return json.Unmarshal(encoded, spec.Linux.Resources.Memory)
}
