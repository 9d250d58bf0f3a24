package nri

import (
	"context"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/runtime-tools/generate"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
)

// Create implements container.Plugins.
func (p *Plugins) Create(ctx context.Context, pod *sandbox.Sandbox, c *container.Container, spec *specs.Spec, inject container.Inject) ([]container.Change, error) {
	if !p.Enabled() {
		return nil, nil
	}
	request := &adaptation.CreateContainerRequest{Pod: p.pod(pod), Container: newContainer(c, spec)}
	if err := p.checkRequired(ctx, request.GetPod(), request.GetContainer().GetName()); err != nil {
		return nil, err
	}
	noted := copyOf(request.Container)
	ctx, t := p.begin(ctx, func() {
		delete(p.podsMade, pod.ID) // it is listed
		p.containersMade[noted.GetId()] = noted
	})
	if t == nil {
		return nil, nil
	}
	defer t.end()
	answer, err := t.adaptation.CreateContainer(ctx, request)
	if err != nil {
		return nil, named(err)
	}
	removeFrom(spec, noted, request.GetContainer())
	if err := adjust(spec, answer.GetAdjust(), inject); err != nil {
		return nil, fmt.Errorf("adjust the container as NRI plugins want: %w: %w", errdefs.ErrInvalidArgument, err)
	}
	return p.changes(answer.GetUpdate()), nil
}

// removeFrom takes out of a spec the variables and devices that plugins have
// removed. The library does so in the container that it asks the next plugin
// about, and leaves it out of its answer.
func removeFrom(spec *specs.Spec, before, after *api.Container) {
	kept := names(after.GetEnv())
	for name := range names(before.GetEnv()) {
		if !kept[name] {
			spec.Process.Env = slices.DeleteFunc(spec.Process.Env, func(v string) bool { return nameOf(v) == name })
		}
	}
	for _, device := range before.GetLinux().GetDevices() {
		if !slices.ContainsFunc(after.GetLinux().GetDevices(), func(d *api.LinuxDevice) bool { return d.GetPath() == device.GetPath() }) {
			specEditor{spec}.RemoveDevice(device.GetPath())
		}
	}
}

func names(env []string) map[string]bool {
	all := make(map[string]bool)
	for _, variable := range env {
		all[nameOf(variable)] = true
	}
	return all
}

func nameOf(variable string) string {
	name, _, _ := strings.Cut(variable, "=")
	return name
}

// adjust changes a spec. The library's generator does most of it.
func adjust(spec *specs.Spec, wanted *api.ContainerAdjustment, inject container.Inject) error {
	if class := wanted.GetLinux().GetResources().GetBlockioClass(); class.GetValue() != "" {
		return fmt.Errorf("block I/O class %q: this runtime has no classes", class.GetValue())
	}
	if class := wanted.GetLinux().GetResources().GetRdtClass(); class.GetValue() != "" {
		return fmt.Errorf("RDT class %q: this runtime has no classes, only closids (linux.rdt)", class.GetValue())
	}
	generator := generate.SpecGenerator(specEditor{spec}, generate.WithCDIDeviceInjector(inject))
	if err := generator.Adjust(wanted); err != nil {
		return err
	}
	adjustMemory(spec, wanted.GetLinux().GetResources().GetMemory())
	return nil
}

// adjustMemory does what the generator leaves out: all but the limit.
func adjustMemory(spec *specs.Spec, wanted *api.LinuxMemory) {
	if wanted == nil {
		return
	}
	memory := specEditor{spec}.memory()
	if v := wanted.GetSwap(); v != nil {
		memory.Swap = v.Get()
	}
	if v := wanted.GetReservation(); v != nil {
		memory.Reservation = v.Get()
	}
	if v := wanted.GetSwappiness(); v != nil {
		memory.Swappiness = v.Get()
	}
	if v := wanted.GetDisableOomKiller(); v != nil {
		memory.DisableOOMKiller = v.Get()
	}
	if v := wanted.GetUseHierarchy(); v != nil {
		memory.UseHierarchy = v.Get()
	}
}
