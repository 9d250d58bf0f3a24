// Package oci turns what the CRI asks for into what an OCI runtime reads (runtime-spec, config.json).
// ForSandbox makes the spec of a pod's pause process, ForContainer that of a container, by a list of small
// rules that each set one part. Golden tests hold the results. The package owns nothing, keeps no state and
// has no side effects. It reads devices, profiles, the mount table and links in the sources of mounts from
// the node; what it needs of an image is in the Container.
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
	"unicode/utf8"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/user"
	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"
	"tags.cncf.io/container-device-interface/pkg/cdi"

	"github.com/minicri/minicri/internal/machine"
)

// Container is the input of ForContainer. Its configs are valid, and the sources of its mounts exist, but not its volumes.
type Container struct {
	ID, SandboxID string
	Pod           *runtimeapi.PodSandboxConfig
	Config        *runtimeapi.ContainerConfig
	Image         Image
	Rootfs        string // where its root is mounted on the host
	Passwd, Group []byte // the contents of its /etc/passwd and /etc/group, empty if it has none
	Hostname      string // the pod's or the node's
	Files         PodFiles
	Namespaces    Namespaces
	VolumesDir    string // for the volumes of its image (see Plan.Volumes)
	// ImageMounts are the host directories of image mounts by container_path, image_sub_path applied.
	ImageMounts map[string]string
	// Resolved is what host_paths of mounts are behind symbolic links, where the caller knows.
	Resolved    map[string]string
	CgroupsPath string
	PidsLimit   int64      // the most processes; 0 is no limit
	SELinux     SELinux    // its labels (see ContainerSELinux)
	CDI         *cdi.Cache // the devices of vendors; nil if there are none
	Machine     machine.Machine
	Defaults    Defaults
}

// Image is the part of an image's configuration that its containers need (image-spec, config.md).
type Image struct {
	Entrypoint, Cmd, Env []string
	WorkingDir           string
	User                 string // a name or a uid, perhaps with ":" and a group
	Volumes              []string
}

// PodFiles are the host paths that the containers of a pod share.
type PodFiles struct {
	Hosts, Hostname, ResolvConf string
	Shm                         string // a mounted tmpfs, or /dev/shm of the node in its IPC namespace
}

// Namespaces are paths, pinned or below /proc/PID/ns; "" is the node's namespace.
type Namespaces struct{ Net, IPC, UTS, PID, User string }

// Plan is the spec of an application container, and what its mounts need before it is made.
type Plan struct {
	Spec    *specs.Spec
	Volumes []Volume // of the image, which the caller fills for the spec's user
	Relabel []Source // which get the SELinux label of the container's files
}

// ForContainer plans an application container.
func ForContainer(c *Container) (p Plan, err error) {
	p.Volumes = imageVolumes(c)
	p.Spec, err = c.spec(
		containerProcess, containerEnv, containerRlimits, containerUser, containerCapabilities, containerNamespaces, containerMounts,
		containerHiddenPaths, containerResources, containerDevices, containerCDI, containerProfiles, containerHome,
	)
	if err == nil {
		p.Relabel, err = relabelled(c)
	}
	return p, err
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

// containerProcess: a command replaces the image's entrypoint, and drops its cmd, which was meant for that. An image's
// entrypoint of one empty string resets the entrypoint of the image below it (Docker's exec form), so it means none.
func containerProcess(c *Container, spec *specs.Spec) error {
	command, args := c.Config.GetCommand(), c.Config.GetArgs()
	if len(command) == 0 {
		if !slices.Equal(c.Image.Entrypoint, []string{""}) {
			command = c.Image.Entrypoint
		}
		if len(args) == 0 {
			args = c.Image.Cmd
		}
	}
	spec.Process.Args = slices.Concat(command, args)
	if len(spec.Process.Args) == 0 {
		return errors.New("no command specified: neither the container nor its image says what to run: give the container a command, or the image an entrypoint")
	}
	// The runtime makes the directory if it is missing.
	spec.Process.Cwd = path.Join("/", cmp.Or(c.Config.GetWorkingDir(), c.Image.WorkingDir))
	spec.Process.Terminal = c.Config.GetTty()
	spec.Process.NoNewPrivileges = spec.Process.NoNewPrivileges || c.security().GetNoNewPrivs()
	spec.Process.OOMScoreAdj = new(c.Machine.OOMScoreAdjNear(int(c.Config.GetLinux().GetResources().GetOomScoreAdj())))
	return nil
}

// CheckCommand checks the command line and the environment that a container will have, but for HOME and what devices add.
func CheckCommand(c *Container) error {
	spec, err := c.spec(containerProcess, containerEnv, containerRlimits)
	if err != nil {
		return err
	}
	return CheckStrings(spec.Process.Args, spec.Process.Env, spec.Process.Rlimits, "config.command, args and envs, with those of the image")
}

// execve(2) bounds each string with its end, and all strings with their pointers (binfmts.h and
// exec.c of the kernel): all may take a quarter of the stack's limit, within these bounds.
const (
	longestArgument = 32 * 4096
	minArguments    = 32 * 4096
	maxArguments    = 6 << 20
	pointer         = 8
)

// CheckStrings checks what a process is executed with. all names both in errors.
func CheckStrings(args, env []string, limits []specs.POSIXRlimit, all string) error {
	limit := min(maxArguments, max(minArguments, softStack(limits)/4))
	total := uint64(0)
	for i, word := range slices.Concat(args, env) {
		problem := ""
		switch {
		case strings.ContainsRune(word, 0):
			problem = "has a NUL character"
		case !utf8.ValidString(word):
			problem = "is not UTF-8, and a runtime-spec, which is JSON, cannot carry it"
		case len(word) >= longestArgument:
			problem = fmt.Sprintf("%d bytes in one string, execve(2) takes less than %d", len(word), longestArgument)
		}
		if problem != "" {
			what := fmt.Sprintf("argument %d of the command", i)
			if i >= len(args) { // without its value, which may be a secret
				name, _, _ := strings.Cut(word, "=")
				what = "environment variable " + name
			}
			return fmt.Errorf("%s: %s: %w", what, problem, errdefs.ErrInvalidArgument)
		}
		total += uint64(len(word)) + 1 + pointer
	}
	if total > limit {
		return fmt.Errorf("%s: %d bytes together, execve(2) takes %d: %w", all, total, limit, errdefs.ErrInvalidArgument)
	}
	return nil
}

// containerEnv sets, of equal names, the last value at the first place. An entry of the image without "=" removes the
// variable that the runtime would set by itself, as Docker and containerd have it.
func containerEnv(c *Container, spec *specs.Spec) error {
	var env []string
	at := make(map[string]int)
	set := func(pair string) {
		name, value, _ := strings.Cut(pair, "=")
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
	set("PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin")
	set("HOSTNAME=" + c.Hostname)
	if c.Config.GetTty() {
		set("TERM=xterm")
	}
	for _, pair := range slices.Concat(spec.Process.Env, c.Defaults.Env) {
		set(pair)
	}
	defaults := len(env)
	for _, pair := range c.Image.Env {
		if strings.Contains(pair, "=") {
			set(pair)
		} else if i, present := at[pair]; present && i < defaults {
			env[i] = ""
		}
	}
	for _, pair := range c.Config.GetEnvs() {
		set(pair.GetKey() + "=" + string(pair.GetValue()))
	}
	spec.Process.Env = slices.DeleteFunc(env, func(pair string) bool { return pair == "" })
	return nil
}

// ForExec makes the process of a command in a container from the container's own process.
func ForExec(first *specs.Process, command []string, terminal bool) *specs.Process {
	process := *first
	process.Args = slices.Clone(command)
	process.Terminal = terminal
	process.Env = slices.Clone(process.Env)
	if terminal && !slices.ContainsFunc(process.Env, func(pair string) bool { return strings.HasPrefix(pair, "TERM=") }) {
		process.Env = append(process.Env, "TERM=xterm")
	}
	return &process
}

// containerUser finds the user in the image's /etc/passwd and /etc/group. The policy Merge adds the groups
// that /etc/group gives the user.
func containerUser(c *Container, spec *specs.Spec) error {
	// "user" or "user:group", names or numbers. The image's group goes with the image's user only.
	security, wanted := c.security(), c.Image.User
	image := cmp.Or(c.Config.GetImage().GetUserSpecifiedImage(), c.Config.GetImage().GetImage())
	from := strings.TrimSpace("of the image " + image)
	switch {
	case security.GetRunAsUser() != nil:
		wanted, from = strconv.FormatInt(security.GetRunAsUser().GetValue(), 10), "of the pod's securityContext"
	case security.GetRunAsUsername() != "":
		wanted, from = security.GetRunAsUsername(), "of the pod's securityContext"
	}
	name, _, _ := strings.Cut(wanted, ":")
	if group := security.GetRunAsGroup(); group != nil {
		wanted = name + ":" + strconv.FormatInt(group.GetValue(), 10)
	}
	found, err := lookUp(c, wanted, from)
	if err != nil {
		return err
	}
	spec.Process.User.UID, spec.Process.User.GID = uint32(found.Uid), uint32(found.Gid)
	// With this group, a program that drops its groups cannot get around a file that denies it.
	groups := []int64{int64(found.Gid)}
	if security.GetSupplementalGroupsPolicy() != runtimeapi.SupplementalGroupsPolicy_Strict {
		member := found
		if name != wanted && name != "" { // ":group" has no user who is a member of groups
			if member, err = lookUp(c, name, from); err != nil {
				return err
			}
		}
		for _, group := range member.Sgids {
			groups = append(groups, int64(group))
		}
	}
	has := make(map[int64]bool) // an image may name a million of them
	for _, group := range append(groups, security.GetSupplementalGroups()...) {
		if !has[group] {
			has[group] = true
			spec.Process.User.AdditionalGids = append(spec.Process.User.AdditionalGids, uint32(group))
		}
	}
	if len(has) > maxGroups {
		return fmt.Errorf("user %q %s: it has %d groups, setgroups(2) takes %d: %w", wanted, from, len(has), maxGroups, errdefs.ErrInvalidArgument)
	}
	return nil
}

// maxGroups is the kernel's NGROUPS_MAX.
const maxGroups = 65536

// containerHome sets HOME if nothing else does. If a volume hides /etc/passwd the runtime looks into it.
func containerHome(c *Container, spec *specs.Spec) error {
	hides := func(m specs.Mount) bool {
		return slices.Contains([]string{"/", "/etc", "/etc/passwd"}, path.Clean(m.Destination))
	}
	says := func(pair string) bool { return strings.HasPrefix(pair, "HOME=") && pair != "HOME=" }
	if slices.ContainsFunc(spec.Process.Env, says) || slices.ContainsFunc(spec.Mounts, hides) {
		return nil
	}
	same := func(u user.User) bool { return u.Uid == int(spec.Process.User.UID) }
	users, err := user.ParsePasswdFilter(bytes.NewReader(c.Passwd), same)
	if err != nil {
		return fmt.Errorf("read the image's /etc/passwd: %w", err)
	}
	home := "/"
	if len(users) > 0 {
		home = cmp.Or(strings.ToValidUTF8(users[0].Home, "\uFFFD"), home) // the spec is JSON
	}
	spec.Process.Env = append(spec.Process.Env, "HOME="+home)
	return nil
}

// lookUp finds a user in the image's files. from says in errors where its name comes from.
func lookUp(c *Container, wanted, from string) (*user.ExecUser, error) {
	found, err := user.GetExecUser(wanted, nil, bytes.NewReader(c.Passwd), bytes.NewReader(c.Group))
	if err != nil {
		return nil, fmt.Errorf("user %q %s: %w of the image; add it there, or use a numeric id: %w", wanted, from, err, errdefs.ErrInvalidArgument)
	}
	// Any number may be in these files; cut to 32 bits it could become root. The highest is the kernel's "no id".
	for _, id := range append(found.Sgids, found.Uid, found.Gid) {
		if id < 0 || id >= math.MaxUint32 {
			return nil, fmt.Errorf("user %q %s: %d is not a user or group id: %w", wanted, from, id, errdefs.ErrInvalidArgument)
		}
	}
	return found, nil
}

// UserOf returns the identity of a spec's process for ContainerStatus.
func UserOf(spec *specs.Spec) *runtimeapi.ContainerUser {
	found := &runtimeapi.LinuxContainerUser{Uid: int64(spec.Process.User.UID), Gid: int64(spec.Process.User.GID)}
	for _, group := range spec.Process.User.AdditionalGids {
		found.SupplementalGroups = append(found.SupplementalGroups, int64(group))
	}
	return &runtimeapi.ContainerUser{Linux: found}
}

// HostUser returns a container's user as the node has it. Ids without a mapping stay as they are.
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
