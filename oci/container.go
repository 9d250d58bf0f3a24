// Package oci turns what the CRI asks for into what an OCI runtime reads
// (runtime-spec, config.json).
//
// A spec is made by an ordered list of small rules, one list for a pod's pause
// process (ForSandbox) and one for its containers (ForContainer). Each rule
// reads the CRI config and the paths that were made for the pod, and sets one
// part of the spec; there is a file for each part, and golden tests hold what it
// makes of a config. The package owns nothing, keeps no state and has no side
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

	"github.com/minicri/minicri/internal/machine"
)

// Container is what the spec of an application container is made from. Both
// configs have passed their checks (package validate), and the sources of the
// mounts are there.
type Container struct {
	ID, SandboxID string
	Pod           *runtimeapi.PodSandboxConfig
	Config        *runtimeapi.ContainerConfig
	Image         Image
	// Rootfs is where the container's root is mounted on the host.
	Rootfs string
	// Passwd and Group are what /etc/passwd and /etc/group in it say, empty
	// where there is none.
	Passwd, Group []byte
	// Hostname is what the container's UTS namespace has, the pod's or the
	// node's.
	Hostname   string
	Files      PodFiles
	Namespaces Namespaces
	// VolumesDir is a directory of this container for the volumes of its image
	// (see ImageVolumes).
	VolumesDir string
	// ImageMounts are the host directories of mounts of images, by
	// container_path, the image_sub_path already applied.
	ImageMounts map[string]string
	// CgroupsPath is where the container is accounted (see CgroupsPath).
	CgroupsPath string
	// PidsLimit is the most processes it may have, 0 for no limit.
	PidsLimit int64
	// SELinux are the labels that were made for it (see ContainerSELinux).
	SELinux SELinux
	// CDI knows the devices of vendors, nil where there are none.
	CDI     CDI
	Machine machine.Machine
	// Defaults are those of the node.
	Defaults Defaults
}

// CDI is what oci needs of a cdi.Cache.
type CDI interface {
	InjectDevices(spec *specs.Spec, devices ...string) (unknown []string, err error)
	GetErrors() map[string][]error
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

// Namespaces are the paths of the namespaces that exist before the container:
// pinned ones, or below /proc/PID/ns of pause or of the target. A path is ""
// where the container lives in the node's.
type Namespaces struct{ Net, IPC, UTS, PID, User string }

type containerRule func(*Container, *specs.Spec) error

func containerRules() []containerRule {
	return []containerRule{
		containerProcess,
		containerEnv,
		containerRlimits,
		containerUser,
		containerCapabilities,
		containerNamespaces,
		containerMounts,
		containerHiddenPaths,
		containerResources,
		containerDevices,
		containerCDI,
		containerSeccomp,
		containerAppArmor,
		containerSELinux,
		containerHome,
	}
}

// ForContainer makes the spec of an application container.
func ForContainer(c *Container) (*specs.Spec, error) {
	spec, err := c.newSpec()
	if err != nil {
		return nil, err
	}
	for _, rule := range containerRules() {
		if err := rule(c, spec); err != nil {
			return nil, err
		}
	}
	return spec, nil
}

// containerAnnotations are those by which tools know a container's spec.
func containerAnnotations(c *Container) map[string]string {
	pod, image := c.Pod.GetMetadata(), c.Config.GetImage()
	annotations := map[string]string{
		"io.kubernetes.cri.container-type":    "container",
		"io.kubernetes.cri.sandbox-id":        c.SandboxID,
		"io.kubernetes.cri.sandbox-name":      pod.GetName(),
		"io.kubernetes.cri.sandbox-namespace": pod.GetNamespace(),
		"io.kubernetes.cri.sandbox-uid":       pod.GetUid(),
		"io.kubernetes.cri.container-name":    c.Config.GetMetadata().GetName(),
		"io.kubernetes.cri.image-name":        cmp.Or(image.GetUserSpecifiedImage(), image.GetImage()),
	}
	if c.Defaults.OwnSandbox {
		delete(annotations, "io.kubernetes.cri.container-type")
	}
	return annotations
}

func (c *Container) security() *runtimeapi.LinuxContainerSecurityContext {
	return c.Config.GetLinux().GetSecurityContext()
}

// pauseOOMScoreAdj makes the pause process one of the last to be killed: with
// it the whole pod would have to be made again.
const pauseOOMScoreAdj = -998

func sandboxProcess(s *Sandbox, spec *specs.Spec) error {
	adjust := s.Machine.OOMScoreAdjNear(pauseOOMScoreAdj)
	spec.Process.Args = []string{PauseProgram}
	spec.Process.Cwd = "/"
	spec.Process.NoNewPrivileges = true
	spec.Process.Capabilities = &specs.LinuxCapabilities{}
	spec.Process.OOMScoreAdj = &adjust
	return nil
}

func containerProcess(c *Container, spec *specs.Spec) error {
	args, err := arguments(c)
	if err != nil {
		return err
	}
	adjust := c.Machine.OOMScoreAdjNear(int(c.Config.GetLinux().GetResources().GetOomScoreAdj()))
	spec.Process.Args = args
	spec.Process.Cwd = workingDir(c)
	spec.Process.Terminal = c.Config.GetTty()
	spec.Process.NoNewPrivileges = spec.Process.NoNewPrivileges || c.security().GetNoNewPrivs()
	spec.Process.OOMScoreAdj = &adjust
	return nil
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

// workingDir is the container's, the image's or the root; libcontainer makes
// it if it is missing.
func workingDir(c *Container) string {
	dir := c.Config.GetWorkingDir()
	if dir == "" {
		dir = c.Image.WorkingDir
	}
	return path.Join("/", dir)
}

// defaultPath is the search path of images that set none.
const defaultPath = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"

// Arguments are the command line and the environment of a container's process,
// without what devices add.
func Arguments(c *Container) (args, env []string, err error) {
	if args, err = arguments(c); err != nil {
		return nil, nil, err
	}
	spec, err := c.newSpec()
	if err != nil {
		return nil, nil, err
	}
	err = containerEnv(c, spec)
	return args, spec.Process.Env, err
}

// VariableName is the name of NAME=VALUE.
func VariableName(pair string) string {
	name, _, _ := strings.Cut(pair, "=")
	return name
}

// containerEnv: what the runtime knows, then the node's defaults, the image and
// the container; the later wins, at the place of the first.
func containerEnv(c *Container, spec *specs.Spec) error {
	env := &environment{at: make(map[string]int)}
	env.set("PATH", defaultPath)
	env.set("HOSTNAME", c.Hostname)
	if c.Config.GetTty() {
		env.set("TERM", "xterm")
	}
	for _, pair := range slices.Concat(spec.Process.Env, c.Defaults.Env, c.Image.Env) {
		name, value, _ := strings.Cut(pair, "=")
		env.set(name, value)
	}
	for _, pair := range c.Config.GetEnvs() {
		env.set(pair.GetKey(), string(pair.GetValue()))
	}
	spec.Process.Env = env.pairs
	return nil
}

type environment struct {
	pairs []string
	at    map[string]int
}

func (e *environment) set(name, value string) {
	if name == "" {
		return // an image may have it, no process can use it
	}
	if i, present := e.at[name]; present {
		e.pairs[i] = name + "=" + value
		return
	}
	e.at[name] = len(e.pairs)
	e.pairs = append(e.pairs, name+"="+value)
}

// ForExec makes the process of a command that is run in a container: all is as
// with the container's own, but for what is run and its terminal.
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

// sandboxUser runs pause as the user that the pod asks for. Pause has no
// /etc/group to look into, so only the groups that are listed count, whatever
// supplemental_groups_policy says.
func sandboxUser(s *Sandbox, spec *specs.Spec) error {
	security := s.security()
	spec.Process.User.UID = uint32(security.GetRunAsUser().GetValue())
	spec.Process.User.GID = uint32(security.GetRunAsGroup().GetValue())
	for _, group := range security.GetSupplementalGroups() {
		spec.Process.User.AdditionalGids = append(spec.Process.User.AdditionalGids, uint32(group))
	}
	return nil
}

// containerUser runs the container as the user that it, or else its image,
// names; /etc/passwd and /etc/group of the image give its ids.
func containerUser(c *Container, spec *specs.Spec) error {
	wanted := userSpec(c)
	found, err := lookUp(c, wanted)
	if err != nil {
		return err
	}
	spec.Process.User.UID, spec.Process.User.GID = uint32(found.Uid), uint32(found.Gid)
	groups, err := supplementalGroups(c, wanted)
	if err != nil {
		return err
	}
	// The primary group is one of the supplemental ones, too: else a program
	// that drops its groups could get around a file that denies that group.
	for _, group := range slices.Concat([]int64{int64(found.Gid)}, groups) {
		if !slices.Contains(spec.Process.User.AdditionalGids, uint32(group)) {
			spec.Process.User.AdditionalGids = append(spec.Process.User.AdditionalGids, uint32(group))
		}
	}
	return nil
}

// containerHome gives the container, and its commands, the home of its user in the
// image's /etc/passwd, if nothing says HOME. Where a volume hides that file the runtime
// looks into it.
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

// userSpec is "user" or "user:group", names or numbers. A group of the image
// belongs to the image's user and goes with it.
func userSpec(c *Container) string {
	security, wanted := c.security(), c.Image.User
	switch {
	case security.GetRunAsUser() != nil:
		wanted = strconv.FormatInt(security.GetRunAsUser().GetValue(), 10)
	case security.GetRunAsUsername() != "":
		wanted = security.GetRunAsUsername()
	}
	if group := security.GetRunAsGroup(); group != nil {
		name, _, _ := strings.Cut(wanted, ":")
		wanted = name + ":" + strconv.FormatInt(group.GetValue(), 10)
	}
	return wanted
}

// supplementalGroups are those that the container lists, and with the policy
// Merge also those that the user has in /etc/group of the image.
func supplementalGroups(c *Container, wanted string) ([]int64, error) {
	listed := c.security().GetSupplementalGroups()
	if c.security().GetSupplementalGroupsPolicy() == runtimeapi.SupplementalGroupsPolicy_Strict {
		return listed, nil
	}
	name, _, _ := strings.Cut(wanted, ":")
	member, err := lookUp(c, name)
	if err != nil {
		return nil, err
	}
	var groups []int64
	for _, group := range member.Sgids {
		groups = append(groups, int64(group))
	}
	return slices.Concat(groups, listed), nil
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

// HostUser returns the ids that a user of a container has on the node: in a user
// namespace others. An id that is not mapped stays as it is.
func HostUser(pod *runtimeapi.PodSandboxConfig, u specs.User) (uid, gid int) {
	userns := UserNamespace(pod)
	return hostID(userns.GetUids(), u.UID), hostID(userns.GetGids(), u.GID)
}

func hostID(mappings []*runtimeapi.IDMapping, id uint32) int {
	for _, m := range mappings {
		if id >= m.GetContainerId() && id-m.GetContainerId() < m.GetLength() {
			return int(m.GetHostId() + id - m.GetContainerId())
		}
	}
	return int(id)
}
