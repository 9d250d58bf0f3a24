package container

import (
	"context"
	"encoding/json"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strconv"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/trace"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
)

func (c *creation) writeSpec(ctx context.Context) (err error) {
	if c.parts.Namespaces, err = c.namespaces(); err != nil {
		return err
	}
	if c.parts.CDI, err = c.vendorDevices(); err != nil {
		return err
	}
	if err := c.makePlan(ctx); err != nil {
		return err
	}
	return c.storeSpec(ctx)
}

// vendorDevices returns what vendors describe now, or nil for a container that asks for no devices.
func (c *creation) vendorDevices() (*cdi.Cache, error) {
	_, annotated, err := cdi.ParseAnnotations(c.config.GetAnnotations())
	if err != nil {
		return nil, fmt.Errorf("CDI annotations: %w", err)
	}
	if len(annotated) == 0 && len(c.config.GetCDIDevices()) == 0 {
		return nil, nil
	}
	return c.owner.cdiDevices()
}

func (s *Store) cdiDevices() (*cdi.Cache, error) {
	return cdi.NewCache(cdi.WithAutoRefresh(false), cdi.WithSpecDirs(s.options.CDIDirs...))
}

// storeSpec puts the spec where the supervisor reads it. HOME, CDI devices and plugins may have added to the environment.
func (c *creation) storeSpec(ctx context.Context) error {
	p := c.plan.Spec.Process
	if err := oci.CheckStrings(p.Args, p.Env, p.Rlimits, "the command and its environment"); err != nil {
		return err
	}
	traceHooks(c.plan.Spec.Hooks, trace.Environment(ctx))
	encoded, err := json.Marshal(c.plan.Spec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.owner.dir(c.ID), specFile), encoded, 0o600)
}

// relabel labels the sources of the mounts that ask for it as the container's files.
func (c *creation) relabel(context.Context) error {
	for _, source := range c.plan.Relabel {
		if err := c.owner.options.Machine.Relabel(source.HostPath, c.labels.Mount, c.labels.Shared()); err != nil {
			return fmt.Errorf("label the source of mount %s: %w", source.ContainerPath, err)
		}
	}
	return nil
}

// traceHooks puts the span that hooks belong to into their environment.
func traceHooks(hooks *specs.Hooks, variables []string) {
	if hooks == nil {
		return
	}
	for _, kind := range [][]specs.Hook{hooks.CreateRuntime, hooks.CreateContainer, hooks.StartContainer, hooks.Poststart, hooks.Poststop, hooks.Prestart} {
		for i := range kind {
			kind[i].Env = slices.Concat(kind[i].Env, variables) // the first of two counts
		}
	}
}

// specFile is the runtime-spec in a container's bundle.
const specFile = "config.json"

func imageFacts(i image.Image) oci.Image {
	config := i.Spec.Config
	return oci.Image{
		Entrypoint: config.Entrypoint, Cmd: config.Cmd, Env: config.Env, WorkingDir: config.WorkingDir,
		User: config.User, Volumes: slices.Collect(maps.Keys(config.Volumes)),
	}
}

// checkAbility refuses what the handler's runtime does not claim to support, and might silently omit.
func checkAbility(spec *specs.Spec, runtime handler.Status) error {
	refuse := func(what, field string) error {
		return fmt.Errorf("the runtime of handler %q does not say that it can %s (%s): use a handler whose runtime can, or do without: %w",
			runtime.Name, what, field, errdefs.ErrInvalidArgument)
	}
	can := runtime.Features
	for _, m := range spec.Mounts {
		if slices.Contains(m.Options, "rro") && !can.RecursiveReadOnlyMounts {
			return refuse("make the mounts below "+m.Destination+" read-only", "recursive_read_only")
		}
	}
	switch kind := shared(spec.Linux.Namespaces); {
	case runtime.OwnSandbox && kind != "":
		return fmt.Errorf("handler %q makes a sandbox for each container, which shares no %s namespace with others (sandbox_per_container): %w", runtime.Name, kind, errdefs.ErrInvalidArgument)
	case len(spec.Linux.NetDevices) > 0 && !can.NetDevices:
		return refuse("move network devices", "linux.netDevices")
	case spec.Linux.MemoryPolicy != nil && !can.MemoryPolicy:
		return refuse("set a memory policy", "linux.memoryPolicy")
	default:
		return nil
	}
}

// shared returns the kind of a namespace that the container shares, or "".
func shared(namespaces []specs.LinuxNamespace) specs.LinuxNamespaceType {
	ownPIDs, ownIPC := false, false
	for _, n := range namespaces {
		ownPIDs = ownPIDs || n.Type == specs.PIDNamespace && n.Path == ""
		ownIPC = ownIPC || n.Type == specs.IPCNamespace
	}
	switch {
	case !ownPIDs:
		return specs.PIDNamespace
	case !ownIPC:
		return specs.IPCNamespace
	default:
		return ""
	}
}

// namespaces are those that a container joins: the pod's pinned ones, and pause's or another container's.
func (c *creation) namespaces() (n oci.Namespaces, err error) {
	options := c.config.GetLinux().GetSecurityContext().GetNamespaceOptions()
	pod := c.sandbox.Config().GetLinux().GetSecurityContext().GetNamespaceOptions()
	pause := c.sandbox.Facts().Pause
	n.Net, n.User = c.owner.options.Sandboxes.NetnsPath(c.sandbox), c.owner.options.Sandboxes.UsernsPath(c.sandbox)
	if n.Net != "" {
		n.UTS, err = c.join(pause, "uts")
	}
	if err == nil && pod.GetIpc() != runtimeapi.NamespaceMode_NODE {
		n.IPC, err = c.join(pause, "ipc")
	}
	if err != nil {
		return n, err
	}
	switch options.GetPid() {
	case runtimeapi.NamespaceMode_POD:
		if pod.GetPid() != runtimeapi.NamespaceMode_NODE {
			n.PID, err = c.join(pause, "pid")
		}
	case runtimeapi.NamespaceMode_TARGET:
		var target process.Facts
		if target, err = c.owner.target(c.sandbox, options.GetTargetId()); err == nil {
			n.PID, err = c.join(target, "pid")
		}
	}
	return n, err
}

// target returns the process whose pid namespace another container asks for.
func (s *Store) target(sb *sandbox.Sandbox, id string) (process.Facts, error) {
	target, err := s.Find(id)
	if err != nil {
		return process.Facts{}, fmt.Errorf("target_id: %w", err)
	}
	if target.SandboxID != sb.ID || target.State() != runtimeapi.ContainerState_CONTAINER_RUNNING {
		return process.Facts{}, fmt.Errorf("target_id: container %s does not run in sandbox %s: %w", target.ID, sb.ID, errdefs.ErrFailedPrecondition)
	}
	return target.Facts().Process, nil
}

// join returns the path of a process's namespace. A pidfd holds the process until recheck.
func (c *creation) join(of process.Facts, kind string) (path string, err error) {
	if c.joined[of.PID] == nil {
		joined, err := c.owner.options.Kernel.OpenProcess(of)
		if err != nil {
			return "", fmt.Errorf("join the %s namespace: %w: %w", kind, err, errdefs.ErrFailedPrecondition)
		}
		c.joined[of.PID] = joined
	}
	return filepath.Join("/proc", strconv.Itoa(of.PID), "ns", kind), nil
}
