// Package oci turns what the CRI asks for into what an OCI runtime reads
// (runtime-spec, config.json).
//
// The spec of a pod's pause process is made by ForSandbox, that of a container by
// ForContainer, which follows an ordered list of small rules. Each rule
// reads the CRI config and the paths that were made for the pod, and sets one
// part of the spec; golden tests hold what it makes of a config. The package owns nothing, keeps no state and has no side
// effects. What is read of the node are devices, profiles, the mount table and
// links in the sources of mounts; what is read of the image comes with the
// Container.
package oci

import (
	"bytes"
	"cmp"
	"errors"
	"fmt"
	"math"
	"path"
	"slices"
	"strconv"
	"strings"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/user"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/minicri/minicri/internal/machine"
)

// Container is what the spec of an application container is made from. Both configs have passed
// package validate, and the sources of the mounts are there.
type Container struct {
	ID, SandboxID string
	Pod           *runtimeapi.PodSandboxConfig
	Config        *runtimeapi.ContainerConfig
	Image         Image
	// Rootfs is where its root is mounted on the host.
	Rootfs string
	// Passwd and Group are /etc/passwd and /etc/group of the root, empty where there is none.
	Passwd, Group []byte
	// Hostname is the pod's or the node's.
	Hostname   string
	Files      PodFiles
	Namespaces Namespaces
	// VolumesDir is for the volumes of its image (see ImageVolumes).
	VolumesDir string
	// ImageMounts are the host directories of mounts of images by container_path, with
	// image_sub_path applied.
	ImageMounts map[string]string
	// CgroupsPath is where the container is accounted (see CgroupsPath).
	CgroupsPath string
	// PidsLimit is the most processes it may have, 0 for no limit.
	PidsLimit int64
	// SELinux are the labels that were made for it (see ContainerSELinux).
	SELinux SELinux
	// CDI knows the devices of vendors, nil where there are none.
	CDI     *cdi.Cache
	Machine machine.Machine
	// Defaults are those of the node.
	Defaults Defaults
}

// Image is what an image's configuration says of the containers made from it
// (image-spec, config.md).
type Image struct {
	Entrypoint, Cmd, Env []string
	WorkingDir           string
	// User is a name or a uid, and perhaps a group after a colon.
	User    string
	Volumes []string
}

// PodFiles are the host paths of what the containers of a pod share.
type PodFiles struct {
	Hosts, Hostname, ResolvConf string
	// Shm is a mounted tmpfs, /dev/shm of the node in its IPC namespace.
	Shm string
}

// Namespaces are the paths of namespaces that exist before the container, pinned or below
// /proc/PID/ns; "" where it lives in the node's.
type Namespaces struct{ Net, IPC, UTS, PID, User string }

// ForContainer makes the spec of an application container.
func ForContainer(c *Container) (*specs.Spec, error) {
	return c.spec(
		containerProcess, containerEnv, containerRlimits, containerUser, containerCapabilities, containerNamespaces, containerMounts,
		containerHiddenPaths, containerResources, containerDevices, containerCDI, containerProfiles, containerHome,
	)
}

func (c *Container) spec(rules ...func(*Container, *specs.Spec) error) (*specs.Spec, error) {
	spec, err := c.newSpec()
	for _, rule := range rules {
		if err == nil {
			err = rule(c, spec)
		}
	}
	if err != nil {
		return nil, err
	}
	return spec, nil
}

func (c *Container) security() *runtimeapi.LinuxContainerSecurityContext {
	return c.Config.GetLinux().GetSecurityContext()
}

func containerProcess(c *Container, spec *specs.Spec) (err error) {
	adjust := c.Machine.OOMScoreAdjNear(int(c.Config.GetLinux().GetResources().GetOomScoreAdj()))
	spec.Process.Args, err = arguments(c)
	// The runtime makes the directory if it is missing.
	spec.Process.Cwd = path.Join("/", cmp.Or(c.Config.GetWorkingDir(), c.Image.WorkingDir))
	spec.Process.Terminal = c.Config.GetTty()
	spec.Process.NoNewPrivileges = spec.Process.NoNewPrivileges || c.security().GetNoNewPrivs()
	spec.Process.OOMScoreAdj = &adjust
	return err
}

// arguments: command stands for the image's entrypoint and args for its cmd,
// and a command alone drops the cmd, which was meant for the entrypoint.
func arguments(c *Container) ([]string, error) {
	command, args := c.Config.GetCommand(), c.Config.GetArgs()
	if len(command) == 0 {
		command = c.Image.Entrypoint
		if len(args) == 0 {
			args = c.Image.Cmd
		}
	}
	all := slices.Concat(command, args)
	if len(all) == 0 || all[0] == "" {
		return nil, errors.New("no command specified: neither the container nor its image says what to run: give the container a command, or the image an entrypoint")
	}
	return all, nil
}

// Process has the command line, the environment and the limits of a container's process,
// without what devices add.
func Process(c *Container) (*specs.Process, error) {
	spec, err := c.spec(containerProcess, containerEnv, containerRlimits)
	if err != nil {
		return nil, err
	}
	return spec.Process, nil
}

// containerEnv: what the runtime knows, the node's defaults, the image, the container; the later
// wins, at the place of the first.
func containerEnv(c *Container, spec *specs.Spec) error {
	var env []string
	at := make(map[string]int)
	set := func(name, value string) {
		i, present := at[name]
		switch {
		case name == "": // an image may have it, no process can use it
		case present:
			env[i] = name + "=" + value
		default:
			at[name] = len(env)
			env = append(env, name+"="+value)
		}
	}
	set("PATH", "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	set("HOSTNAME", c.Hostname)
	if c.Config.GetTty() {
		set("TERM", "xterm")
	}
	for _, pair := range slices.Concat(spec.Process.Env, c.Defaults.Env, c.Image.Env) {
		name, value, _ := strings.Cut(pair, "=")
		set(name, value)
	}
	for _, pair := range c.Config.GetEnvs() {
		set(pair.GetKey(), string(pair.GetValue()))
	}
	spec.Process.Env = env
	return nil
}

// ForExec makes the process of a command in a container: like its own, but for what is run and
// its terminal.
func ForExec(spec *specs.Spec, command []string, terminal bool) *specs.Process {
	process := *spec.Process
	process.Args = slices.Clone(command)
	process.Terminal = terminal
	process.Env = slices.Clone(process.Env)
	hasTerm := slices.ContainsFunc(process.Env, func(pair string) bool { return strings.HasPrefix(pair, "TERM=") })
	if terminal && !hasTerm {
		process.Env = append(process.Env, "TERM=xterm")
	}
	return &process
}

// containerUser takes the ids of the user that the container, or else its image, names from
// /etc/passwd and /etc/group of the image. With the policy Merge the user's groups in /etc/group
// are added to those that are listed.
func containerUser(c *Container, spec *specs.Spec) error {
	// "user" or "user:group", names or numbers. A group of the image belongs to the image's
	// user and goes with it.
	security, wanted := c.security(), c.Image.User
	switch {
	case security.GetRunAsUser() != nil:
		wanted = strconv.FormatInt(security.GetRunAsUser().GetValue(), 10)
	case security.GetRunAsUsername() != "":
		wanted = security.GetRunAsUsername()
	}
	name, _, _ := strings.Cut(wanted, ":")
	if group := security.GetRunAsGroup(); group != nil {
		wanted = name + ":" + strconv.FormatInt(group.GetValue(), 10)
	}
	found, err := lookUp(c, wanted)
	if err != nil {
		return err
	}
	spec.Process.User.UID, spec.Process.User.GID = uint32(found.Uid), uint32(found.Gid)
	// The primary group is one of the supplemental ones, too: else a program
	// that drops its groups could get around a file that denies that group.
	groups := []int64{int64(found.Gid)}
	if security.GetSupplementalGroupsPolicy() != runtimeapi.SupplementalGroupsPolicy_Strict {
		member, err := lookUp(c, name)
		if err != nil {
			return err
		}
		for _, group := range member.Sgids {
			groups = append(groups, int64(group))
		}
	}
	for _, group := range append(groups, security.GetSupplementalGroups()...) {
		if !slices.Contains(spec.Process.User.AdditionalGids, uint32(group)) {
			spec.Process.User.AdditionalGids = append(spec.Process.User.AdditionalGids, uint32(group))
		}
	}
	return nil
}

// containerHome sets HOME from the image's /etc/passwd if nothing else does. Where a volume
// hides that file the runtime looks into it.
func containerHome(c *Container, spec *specs.Spec) error {
	hides := func(m specs.Mount) bool {
		return slices.Contains([]string{"/", "/etc", "/etc/passwd"}, path.Clean(m.Destination))
	}
	says := func(pair string) bool { return strings.HasPrefix(pair, "HOME=") && pair != "HOME=" }
	if slices.ContainsFunc(spec.Process.Env, says) || slices.ContainsFunc(spec.Mounts, hides) {
		return nil
	}
	found, err := lookUp(c, strconv.FormatUint(uint64(spec.Process.User.UID), 10))
	if err != nil {
		return err
	}
	spec.Process.Env = append(spec.Process.Env, "HOME="+cmp.Or(found.Home, "/"))
	return nil
}

func lookUp(c *Container, wanted string) (*user.ExecUser, error) {
	found, err := user.GetExecUser(wanted, nil, bytes.NewReader(c.Passwd), bytes.NewReader(c.Group))
	if err != nil {
		return nil, fmt.Errorf("user %q of the image: %w: %w", wanted, err, errdefs.ErrInvalidArgument)
	}
	// A number in these files may be any; cut to 32 bits it could become root.
	for _, id := range append(found.Sgids, found.Uid, found.Gid) {
		if id < 0 || id > math.MaxInt32 {
			return nil, fmt.Errorf("user %q of the image: %d is not a user or group id: %w", wanted, id, errdefs.ErrInvalidArgument)
		}
	}
	return found, nil
}

// UserOf is the identity of a spec's first process as ContainerStatus has it.
func UserOf(spec *specs.Spec) *runtimeapi.ContainerUser {
	found := &runtimeapi.LinuxContainerUser{Uid: int64(spec.Process.User.UID), Gid: int64(spec.Process.User.GID)}
	for _, group := range spec.Process.User.AdditionalGids {
		found.SupplementalGroups = append(found.SupplementalGroups, int64(group))
	}
	return &runtimeapi.ContainerUser{Linux: found}
}

// ProcessUser is the user that the container runs as.
func ProcessUser(c *Container) (specs.User, error) {
	spec := &specs.Spec{Process: &specs.Process{}}
	err := containerUser(c, spec)
	return spec.Process.User, err
}

// HostUser returns the ids of a container's user on the node. An id that the pod's user
// namespace does not map stays as it is.
func HostUser(pod *runtimeapi.PodSandboxConfig, u specs.User) (uid, gid int) {
	onHost := func(mappings []*runtimeapi.IDMapping, id uint32) int {
		for _, m := range mappings {
			if id >= m.GetContainerId() && id-m.GetContainerId() < m.GetLength() {
				return int(m.GetHostId() + id - m.GetContainerId())
			}
		}
		return int(id)
	}
	userns := UserNamespace(pod)
	return onHost(userns.GetUids(), u.UID), onHost(userns.GetGids(), u.GID)
}
