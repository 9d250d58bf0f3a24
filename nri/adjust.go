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
	if err := p.checkRequired(request.GetPod(), request.GetContainer().GetName()); err != nil {
		return nil, err
	}
	noted := copyOf(request.Container)
	var answer *adaptation.CreateContainerResponse
	updaters, err := p.request(ctx, func() {
		delete(p.podsMade, pod.ID) // it is listed
		p.containersMade[noted.GetId()] = noted
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

// specEditor is a runtime-spec with the methods that the NRI library wants of
// the generator of runtime-tools (generate.UnderlyingGenerator there). That
// module brings a validator with a JSON schema engine, which the daemon does
// not need. Every spec edited here was made by package oci: it has a process
// and a linux part.
type specEditor struct{ spec *specs.Spec }

func (e specEditor) Spec() *specs.Spec { return e.spec }

func (e specEditor) AddAnnotation(key, value string) {
	if e.spec.Annotations == nil {
		e.spec.Annotations = make(map[string]string)
	}
	e.spec.Annotations[key] = value
}

func (e specEditor) RemoveAnnotation(key string) { delete(e.spec.Annotations, key) }

func (e specEditor) SetProcessArgs(args []string) { e.spec.Process.Args = args }

func (e specEditor) SetProcessOOMScoreAdj(score int) { e.spec.Process.OOMScoreAdj = &score }

func (e specEditor) ClearProcessEnv() { e.spec.Process.Env = nil }

// AddProcessEnv sets a variable, also one that is there already.
func (e specEditor) AddProcessEnv(name, value string) {
	variable := name + "=" + value
	for i, old := range e.spec.Process.Env {
		if strings.HasPrefix(old, name+"=") {
			e.spec.Process.Env[i] = variable
			return
		}
	}
	e.spec.Process.Env = append(e.spec.Process.Env, variable)
}

func (e specEditor) hooks() *specs.Hooks {
	if e.spec.Hooks == nil {
		e.spec.Hooks = &specs.Hooks{}
	}
	return e.spec.Hooks
}

func (e specEditor) AddPostStartHook(hook specs.Hook) {
	e.hooks().Poststart = append(e.hooks().Poststart, hook)
}

func (e specEditor) AddPostStopHook(hook specs.Hook) {
	e.hooks().Poststop = append(e.hooks().Poststop, hook)
}

func (e specEditor) AddPreStartHook(hook specs.Hook) {
	//nolint:staticcheck // deprecated in the runtime-spec, and still a kind that plugins may add
	e.hooks().Prestart = append(e.hooks().Prestart, hook)
}

func (e specEditor) Mounts() []specs.Mount { return e.spec.Mounts }

func (e specEditor) ClearMounts() { e.spec.Mounts = nil }

func (e specEditor) AddMount(mount specs.Mount) { e.spec.Mounts = append(e.spec.Mounts, mount) }

func (e specEditor) RemoveMount(destination string) {
	e.spec.Mounts = slices.DeleteFunc(e.spec.Mounts, func(m specs.Mount) bool { return m.Destination == destination })
}

func (e specEditor) SetLinuxRootPropagation(propagation string) error {
	e.spec.Linux.RootfsPropagation = propagation
	return nil
}

func (e specEditor) SetLinuxCgroupsPath(path string) { e.spec.Linux.CgroupsPath = path }

func (e specEditor) AddDevice(device specs.LinuxDevice) {
	e.RemoveDevice(device.Path)
	e.spec.Linux.Devices = append(e.spec.Linux.Devices, device)
}

func (e specEditor) RemoveDevice(path string) {
	e.spec.Linux.Devices = slices.DeleteFunc(e.spec.Linux.Devices, func(d specs.LinuxDevice) bool { return d.Path == path })
}

func (e specEditor) AddLinuxSysctl(key, value string) {
	if e.spec.Linux.Sysctl == nil {
		e.spec.Linux.Sysctl = make(map[string]string)
	}
	e.spec.Linux.Sysctl[key] = value
}

func (e specEditor) RemoveLinuxSysctl(key string) { delete(e.spec.Linux.Sysctl, key) }

// AddOrReplaceLinuxNamespace takes the kinds of the runtime-spec, as "network".
func (e specEditor) AddOrReplaceLinuxNamespace(kind, path string) error {
	if err := e.RemoveLinuxNamespace(kind); err != nil {
		return err
	}
	e.spec.Linux.Namespaces = append(e.spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.LinuxNamespaceType(kind), Path: path})
	return nil
}

func (e specEditor) RemoveLinuxNamespace(kind string) error {
	known := []specs.LinuxNamespaceType{
		specs.PIDNamespace, specs.NetworkNamespace, specs.MountNamespace, specs.IPCNamespace,
		specs.UTSNamespace, specs.UserNamespace, specs.CgroupNamespace, specs.TimeNamespace,
	}
	if !slices.Contains(known, specs.LinuxNamespaceType(kind)) {
		return fmt.Errorf("%q is no kind of namespace", kind)
	}
	e.spec.Linux.Namespaces = slices.DeleteFunc(e.spec.Linux.Namespaces, func(n specs.LinuxNamespace) bool {
		return n.Type == specs.LinuxNamespaceType(kind)
	})
	return nil
}

func (e specEditor) resources() *specs.LinuxResources {
	if e.spec.Linux.Resources == nil {
		e.spec.Linux.Resources = &specs.LinuxResources{}
	}
	return e.spec.Linux.Resources
}

func (e specEditor) cpu() *specs.LinuxCPU {
	if e.resources().CPU == nil {
		e.resources().CPU = &specs.LinuxCPU{}
	}
	return e.resources().CPU
}

func (e specEditor) memory() *specs.LinuxMemory {
	if e.resources().Memory == nil {
		e.resources().Memory = &specs.LinuxMemory{}
	}
	return e.resources().Memory
}

func (e specEditor) SetLinuxResourcesCPUCpus(cpus string)     { e.cpu().Cpus = cpus }
func (e specEditor) SetLinuxResourcesCPUMems(mems string)     { e.cpu().Mems = mems }
func (e specEditor) SetLinuxResourcesCPUPeriod(period uint64) { e.cpu().Period = &period }
func (e specEditor) SetLinuxResourcesCPUQuota(quota int64)    { e.cpu().Quota = &quota }
func (e specEditor) SetLinuxResourcesCPURealtimePeriod(period uint64) {
	e.cpu().RealtimePeriod = &period
}

func (e specEditor) SetLinuxResourcesCPURealtimeRuntime(runtime int64) {
	e.cpu().RealtimeRuntime = &runtime
}
func (e specEditor) SetLinuxResourcesCPUShares(shares uint64) { e.cpu().Shares = &shares }
func (e specEditor) SetLinuxResourcesMemoryLimit(limit int64) { e.memory().Limit = &limit }
func (e specEditor) SetLinuxResourcesMemorySwap(swap int64)   { e.memory().Swap = &swap }

func (e specEditor) AddLinuxResourcesUnified(key, value string) {
	if e.resources().Unified == nil {
		e.resources().Unified = make(map[string]string)
	}
	e.resources().Unified[key] = value
}

func (e specEditor) AddLinuxResourcesHugepageLimit(size string, limit uint64) {
	r := e.resources()
	r.HugepageLimits = slices.DeleteFunc(r.HugepageLimits, func(l specs.LinuxHugepageLimit) bool { return l.Pagesize == size })
	r.HugepageLimits = append(r.HugepageLimits, specs.LinuxHugepageLimit{Pagesize: size, Limit: limit})
}

func (e specEditor) AddLinuxResourcesDevice(allow bool, kind string, major, minor *int64, access string) {
	e.resources().Devices = append(e.resources().Devices, specs.LinuxDeviceCgroup{Allow: allow, Type: kind, Major: major, Minor: minor, Access: access})
}
