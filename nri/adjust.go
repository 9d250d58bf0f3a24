package nri

import (
	"cmp"
	"context"
	"encoding/json"
	"fmt"
	"slices"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/containerd/nri/pkg/adaptation"
	"github.com/containerd/nri/pkg/api"
	"github.com/containerd/nri/pkg/runtime-tools/generate"
	"github.com/opencontainers/runtime-spec/specs-go"
	ocigenerate "github.com/opencontainers/runtime-tools/generate"
	"google.golang.org/protobuf/proto"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
)

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
	updaters, err := p.request(ctx, func(d *door) {
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
