package runtime

import (
	"os"
	"path/filepath"
	"slices"

	"github.com/moby/sys/userns"
	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

// startInit brings the process to the exec barrier: by a launch if that can do all
// that it needs.
func (c *builtinContainer) startInit(config *configs.Config, process *libcontainer.Process, streams Streams) (*Process, error) {
	if len(c.hooks) == 0 && needsInit(config, process, streams) == "" {
		return c.launch(config, process, streams)
	}
	return c.start(process, streams, nil)
}

// needsInit says what of a container only libcontainer's init can do, "" if a
// launch (launch.go) does all of it. It is meant for pause, of which each pod
// has one: what few pauses need is left to libcontainer, so that it is done in one
// way only.
func needsInit(config *configs.Config, p *libcontainer.Process, streams Streams) string {
	for _, why := range []string{
		initForNode(), initForProcess(p, streams), initForNamespaces(config.Namespaces), initForMounts(config),
		initForLabels(config, p), initForSettings(config), initForSeccomp(config.Seccomp),
	} {
		if why != "" {
			return why
		}
	}
	return ""
}

// initForNode: in a user namespace options of the node's mounts cannot be removed
// (mount_namespaces(7), "Restrictions on mount namespaces"), which libcontainer finds
// out mount by mount.
func initForNode() string {
	if userns.RunningInUserNS() {
		return "a node in a user namespace"
	}
	return ""
}

func initForProcess(p *libcontainer.Process, streams Streams) string {
	switch {
	case streams.Terminal || slices.ContainsFunc(streams.files(), hasOwner):
		return "streams: they are given to the user of the process"
	case len(p.Args) == 0 || !filepath.IsAbs(p.Args[0]):
		return "a program that has to be looked for"
	case p.Cwd != "/":
		return "a working directory, which may have to be made"
	case len(p.ExtraFiles) > 0 || len(p.Env) > 0:
		return "an environment"
	case p.NoNewPrivileges == nil || !*p.NoNewPrivileges:
		return "privileges that it may get: its filter is then loaded while it still has its own"
	case len(p.Rlimits) > 0 || p.Scheduler != nil || p.IOPriority != nil || p.CPUAffinity != nil:
		return "limits and priorities"
	case p.Capabilities == nil || hasAny(p.Capabilities):
		return "capabilities"
	}
	return ""
}

// hasOwner reports whether the owner of the stream matters: it can be opened anew
// by its name in /proc/self/fd, which sockets cannot (proc_pid_fd(5)).
func hasOwner(stream *os.File) bool {
	if stream == nil {
		return false
	}
	info, err := stream.Stat()
	return err != nil || info.Mode()&os.ModeSocket == 0
}

// files are stdin, stdout and stderr; nil for /dev/null.
func (s Streams) files() []*os.File { return []*os.File{s.Stdin, s.Stdout, s.Stderr} }

// copyOrNull is what a process gets as its stream of that number.
func copyOrNull(given *os.File, number int) (*os.File, error) {
	if given == nil {
		return os.OpenFile(os.DevNull, min(number, os.O_WRONLY), 0)
	}
	return copyFile(given)
}

func hasAny(c *configs.Capabilities) bool {
	return len(c.Bounding)+len(c.Effective)+len(c.Inheritable)+len(c.Permitted)+len(c.Ambient) > 0
}

// initForNamespaces: a user namespace has to be entered before the others are
// made, by a process of its own.
func initForNamespaces(namespaces configs.Namespaces) string {
	for _, n := range namespaces {
		switch n.Type {
		case configs.NEWNS, configs.NEWUTS, configs.NEWIPC, configs.NEWPID:
			if n.Path != "" {
				return "a namespace that is joined: " + string(n.Type)
			}
		case configs.NEWNET:
			if n.Path == "" {
				return "a network namespace of its own"
			}
		default:
			return "a namespace of type " + string(n.Type)
		}
	}
	if !namespaces.Contains(configs.NEWNS) {
		return "the mount namespace of the node"
	}
	return ""
}

// initForMounts: proc and plain binds onto directories that are there, in a root
// that only the node can write to.
func initForMounts(config *configs.Config) string {
	proc := false
	for _, m := range config.Mounts {
		switch {
		case m.Device != "proc" && m.Device != "bind":
			return "a mount of type " + m.Device
		case len(m.PropagationFlags) > 0 || m.ClearedFlags != 0 || m.RecAttr != nil || m.Extensions != 0 || m.IDMapping != nil:
			return "options of the mount on " + m.Destination
		case m.Device == "bind" && m.Flags&unix.MS_REC != 0:
			return "a recursive bind on " + m.Destination
		}
		proc = proc || m.Device == "proc" && m.Destination == "/proc"
	}
	switch {
	case !proc:
		return "no /proc"
	case !config.Readonlyfs || config.NoPivotRoot || config.RootPropagation != 0:
		return "a root that is not read-only and private"
	case len(config.MaskPaths)+len(config.ReadonlyPaths) > 0:
		return "masked paths"
	}
	return ""
}

func initForLabels(config *configs.Config, p *libcontainer.Process) string {
	if config.ProcessLabel != "" || config.MountLabel != "" || config.AppArmorProfile != "" || p.Label != "" || p.AppArmorProfile != "" {
		return "labels of SELinux or a profile of AppArmor"
	}
	return ""
}

func initForSettings(config *configs.Config) string {
	switch {
	case len(config.Hooks) > 0:
		return "hooks"
	case len(config.Networks)+len(config.Routes)+len(config.NetDevices) > 0:
		return "network devices"
	case config.Domainname != "" || config.Umask != nil || config.Personality != nil || config.ParentDeathSignal != 0:
		return "settings of the process"
	case config.IntelRdt != nil || config.MemoryPolicy != nil || config.Scheduler != nil || config.IOPriority != nil || len(config.TimeOffsets) > 0:
		return "resources besides cgroups"
	case config.RootlessEUID || config.RootlessCgroups:
		return "no root"
	}
	return ""
}
