package nri

import (
	"fmt"
	"slices"
	"strings"

	"github.com/opencontainers/runtime-spec/specs-go"
)

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
