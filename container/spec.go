package container

import (
	"context"
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"unicode/utf8"

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

// makeSources makes the directories of the node that the container's mounts come
// from, when all of them answer.
func (c *creation) makeSources(ctx context.Context) error {
	if err := c.owner.awaitHostPaths(ctx, c.config.GetMounts()); err != nil {
		return err
	}
	images, err := c.imageSources()
	if err != nil {
		return err
	}
	o := c.owner.options
	c.parts = &oci.Container{
		ID: c.ID, SandboxID: c.SandboxID, Pod: c.sandbox.Config(), Config: c.config, Image: imageFacts(c.image),
		Rootfs: c.owner.rootfs(c.ID), Hostname: o.Sandboxes.Hostname(c.sandbox), Files: o.Sandboxes.PodFiles(c.sandbox),
		VolumesDir: c.owner.volumes(c.ID), ImageMounts: images,
		CgroupsPath: c.CgroupsPath, PidsLimit: o.PidsLimit, Machine: o.Machine, Defaults: c.owner.defaultsOf(c.sandbox), SELinux: c.labels,
	}
	return makeSources(c.parts)
}

// fillVolumes makes the volumes that the image declares, with what the image has
// in their place.
func (c *creation) fillVolumes(context.Context) error {
	volumes := oci.ImageVolumes(c.parts)
	if len(volumes) == 0 {
		return nil
	}
	if err := makePrivate(c.parts.VolumesDir, rootOf(c.parts.Pod)); err != nil {
		return err
	}
	if err := readUsers(c.parts); err != nil {
		return err
	}
	user, err := oci.ProcessUser(c.parts)
	if err != nil {
		return err
	}
	uid, gid := oci.HostUser(c.parts.Pod, user)
	return fillVolumes(c.parts.Rootfs, volumes, owner{uid, gid})
}

// writeSpec makes the runtime-spec and puts it where the supervisor reads it.
func (c *creation) writeSpec(ctx context.Context) (err error) {
	if c.parts.Namespaces, err = c.namespaces(); err != nil {
		return err
	}
	if c.parts.CDI, err = c.vendorDevices(); err != nil {
		return err
	}
	if err := readUsers(c.parts); err != nil {
		return err
	}
	if c.spec, err = oci.ForContainer(c.parts); err != nil {
		return err
	}
	return c.storeSpec(ctx)
}

// vendorDevices are the devices that vendors describe now; nil for a container that asks
// for none. Their files are parsed for each container that does, because they may change
// at any time.
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

// storeSpec puts the spec where the supervisor reads it.
func (c *creation) storeSpec(ctx context.Context) error {
	traceHooks(c.spec.Hooks, trace.Environment(ctx))
	encoded, err := json.Marshal(c.spec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.owner.dir(c.ID), specFile), encoded, 0o600)
}

// traceHooks gives hooks the span that they belong to, in their environment.
func traceHooks(hooks *specs.Hooks, variables []string) {
	if hooks == nil || len(variables) == 0 {
		return
	}
	for _, kind := range [][]specs.Hook{hooks.CreateRuntime, hooks.CreateContainer, hooks.StartContainer, hooks.Poststart, hooks.Poststop, hooks.Prestart} {
		for i := range kind {
			known := slices.ContainsFunc(kind[i].Env, func(v string) bool { return strings.HasPrefix(v, "TRACEPARENT=") })
			if !known {
				kind[i].Env = slices.Concat(kind[i].Env, variables)
			}
		}
	}
}

// specFile is the runtime-spec in a container's directory, its bundle.
const specFile = "config.json"

// relabel gives the sources of mounts the labels of the container.
func (c *creation) relabel(context.Context) error { return relabel(c.parts) }

func imageFacts(i image.Image) oci.Image {
	config := i.Spec.Config
	facts := oci.Image{
		Entrypoint: config.Entrypoint, Cmd: config.Cmd, Env: config.Env, WorkingDir: config.WorkingDir,
		User: config.User,
	}
	for volume := range config.Volumes {
		facts.Volumes = append(facts.Volumes, volume)
	}
	return facts
}

// What execve(2) takes (binfmts.h, exec.c of the kernel): each string, with its
// end, and all of them with their pointers. The whole may be a quarter of the
// stack's limit, within these bounds.
const (
	longestArgument = 32 * 4096
	leastArguments  = 32 * 4096
	mostArguments   = 6 << 20
	pointer         = 8
)

// checkArguments refuses a command and an environment that no program could be
// executed with, before anything of them is written.
func checkArguments(c *oci.Container) error {
	p, err := oci.Process(c)
	if err != nil {
		return err
	}
	return checkStrings(p.Args, p.Env, oci.SoftStack(p.Rlimits), "config.command, args and envs, with those of the image")
}

// checkExec is checkArguments for a command in a container that is there, whose
// environment was checked when it was made.
func checkExec(p *specs.Process) error {
	return checkStrings(p.Args, nil, oci.SoftStack(p.Rlimits), "cmd")
}

// checkStrings is for a process with this limit of its stack, in bytes. all is
// what an error calls args and env together.
func checkStrings(args, env []string, stack uint64, all string) error {
	limit := min(mostArguments, max(leastArguments, stack/4))
	total := uint64(0)
	for _, list := range [][]string{args, env} {
		for i, word := range list {
			if strings.ContainsRune(word, 0) {
				return fmt.Errorf("%s: has a NUL character: %w", what(args, list, i), errdefs.ErrInvalidArgument)
			}
			if !utf8.ValidString(word) {
				return fmt.Errorf("%s: is not UTF-8, and a runtime-spec, which is JSON, cannot carry it: %w", what(args, list, i), errdefs.ErrInvalidArgument)
			}
			if len(word) >= longestArgument {
				return fmt.Errorf("%s: %d bytes in one string, execve(2) takes less than %d: %w", what(args, list, i), len(word), longestArgument, errdefs.ErrInvalidArgument)
			}
			total += uint64(len(word)) + 1 + pointer
		}
	}
	if total > limit {
		return fmt.Errorf("%s: %d bytes together, execve(2) takes %d: %w", all, total, limit, errdefs.ErrInvalidArgument)
	}
	return nil
}

// what names a string, without its value, which may be a secret.
func what(args, list []string, i int) string {
	if len(args) > 0 && &list[0] == &args[0] {
		return fmt.Sprintf("argument %d of the command", i)
	}
	name, _, _ := strings.Cut(list[i], "=")
	return "environment variable " + name
}

// checkAbility refuses a spec with what the handler's runtime does not say that it
// can do, and would pass over without a word: a mount that is writable all the same,
// a network device that stays where it is.
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
	if runtime.OwnSandbox {
		if kind := shared(spec.Linux.Namespaces); kind != "" {
			return fmt.Errorf("handler %q makes a sandbox for each container, which shares no %s namespace with others (sandbox_per_container): %w", runtime.Name, kind, errdefs.ErrInvalidArgument)
		}
	}
	switch {
	case len(spec.Linux.NetDevices) > 0 && !can.NetDevices:
		return refuse("move network devices", "linux.netDevices")
	case spec.Linux.MemoryPolicy != nil && !can.MemoryPolicy:
		return refuse("set a memory policy", "linux.memoryPolicy")
	default:
		return nil
	}
}

// shared is the kind of a namespace that a sandbox of the container's own would not
// share, although the container asks for it: that of another's processes, the node's
// processes or its IPC.
func shared(namespaces []specs.LinuxNamespace) specs.LinuxNamespaceType {
	find := func(kind specs.LinuxNamespaceType) int {
		return slices.IndexFunc(namespaces, func(n specs.LinuxNamespace) bool { return n.Type == kind })
	}
	if at := find(specs.PIDNamespace); at < 0 || namespaces[at].Path != "" {
		return specs.PIDNamespace
	}
	if find(specs.IPCNamespace) < 0 {
		return specs.IPCNamespace
	}
	return ""
}

// namespaces are those of the pod that a container joins: the pinned ones, and
// those that pause, or another container, holds.
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

// target is the process whose pid namespace another container asks for.
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

// join is the path of a process's namespace, by its pid. The process is held by a
// pidfd until the container has joined: see recheckJoined.
func (c *creation) join(of process.Facts, kind string) (path string, err error) {
	held, err := process.Open(of)
	if err != nil {
		return "", fmt.Errorf("join the %s namespace: %w: %w", kind, err, errdefs.ErrFailedPrecondition)
	}
	c.joined = append(c.joined, held)
	return filepath.Join("/proc", strconv.Itoa(of.PID), "ns", kind), nil
}

// recheckJoined fails if a process whose namespace the container has joined has ended
// meanwhile: its pid may have become that of another, and the namespace the node's.
func (c *creation) recheckJoined() error {
	for _, held := range c.joined {
		if held.Ended() {
			return fmt.Errorf("process %d, whose namespaces it was to join, has ended: %w", held.PID, errdefs.ErrFailedPrecondition)
		}
	}
	return nil
}

func (c *creation) closeJoined() {
	for _, held := range c.joined {
		_ = held.Close() // a descriptor of ours: that cannot fail
	}
}
