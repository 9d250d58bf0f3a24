package runtime

import (
	"cmp"
	"errors"
	"fmt"
	"log/slog"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/opencontainers/runc/libcontainer"
	"github.com/opencontainers/runc/libcontainer/configs"
	"golang.org/x/sys/unix"
)

// startLib has libcontainer start an init or an exec. libcontainer's init copies all
// mounts that it sees, reads their list twice and unmounts them again, and a node has
// some more with each pod: so it starts where nothing is mounted but what it needs.
func (c *builtinContainer) startLib(process *libcontainer.Process) error {
	if !process.Init {
		return c.lib.Start(process) // it joins the mounts of its container
	}
	closeNulls, err := giveNulls(process)
	if err != nil {
		return err
	}
	defer closeNulls()
	config := c.lib.Config()
	paths, why := c.runtime.mountsOfStart(&config)
	if why == "" {
		started, err := c.runtime.amongMounts(paths, func() error { return c.lib.Start(process) })
		if started {
			return err
		}
		// What is missing here is missing there too, and libcontainer says it as users know it.
		why = err.Error()
	}
	slog.Info("the container starts among all mounts of the node", "container", c.lib.ID(), "why", why)
	return c.lib.Start(process)
}

// giveNulls opens /dev/null for the streams that the process has not got: what a
// thread with mounts of its own opens has no name when they are gone.
func giveNulls(process *libcontainer.Process) (closeNulls func(), err error) {
	if process.ConsoleSocket != nil {
		return func() {}, nil
	}
	in, err := copyOrNull(nil, 0)
	if err != nil {
		return nil, err
	}
	out, err := copyOrNull(nil, 1)
	if err != nil {
		return nil, errors.Join(err, in.Close())
	}
	if process.Stdin == nil {
		process.Stdin = in
	}
	if process.Stdout == nil {
		process.Stdout = out
	}
	if process.Stderr == nil {
		process.Stderr = out
	}
	return func() { closeAll([]*os.File{in, out}) }, nil
}

// maxTrees is how many descriptors a start may take for what it needs.
const maxTrees = 256

// mountedPath is something of the node that is there at the same path for a start.
type mountedPath struct {
	path      string
	recursive bool // with what is mounted below
}

// nodeTrees are those of the kernel, which libcontainer and its init use by paths of
// their own, and what the dynamic linker loads init with.
var nodeTrees = [...]string{"/dev", "/lib", "/lib64", "/proc", "/sys", "/usr"}

// linkerCache says where in them (ld.so(8)).
const linkerCache = "/etc/ld.so.cache"

// mountsOfStart is what init needs of the node to start in an otherwise empty mount
// namespace, parents first. Where that cannot be said, why is not "".
func (b *Builtin) mountsOfStart(config *configs.Config) (paths []mountedPath, why string) {
	if why := cmp.Or(needsNodesMounts(config), b.otherLibrary()); why != "" {
		return nil, why
	}
	for _, tree := range nodeTrees {
		paths = appendExisting(paths, tree, true)
	}
	paths = appendExisting(paths, linkerCache, false)
	if b.systemdCgroup {
		for _, sockets := range []string{"/run/systemd", "/run/dbus", "/var/run/dbus"} {
			paths = appendExisting(paths, sockets, false)
		}
	}
	paths = append(paths, mountedPath{b.root, false}, mountedPath{config.Rootfs, true})
	for _, n := range config.Namespaces {
		if n.Path != "" {
			paths = append(paths, mountedPath{n.Path, false})
		}
	}
	for _, m := range config.Mounts {
		if m.IsBind() {
			paths = append(paths, mountedPath{m.Source, m.Flags&unix.MS_REC != 0})
		}
		if m.IDMapping != nil && m.IDMapping.UserNSPath != "" {
			paths = append(paths, mountedPath{m.IDMapping.UserNSPath, false})
		}
	}
	return withoutThoseBelow(paths)
}

// needsNodesMounts says what of a container refers to files of the node by paths
// that are not known here.
func needsNodesMounts(config *configs.Config) string {
	switch {
	case initForNode() != "":
		return initForNode()
	case !config.Namespaces.Contains(configs.NEWNS) || config.Namespaces.PathOf(configs.NEWNS) != "":
		return "mounts that are not its own"
	case len(config.Hooks) > 0:
		return "hooks"
	case config.Seccomp != nil && config.Seccomp.ListenerPath != "":
		return "a socket for notices of seccomp"
	case config.IntelRdt != nil:
		return "resctrl"
	case config.ParentDeathSignal != 0:
		return "a signal as the thread that starts it ends"
	case config.RootlessEUID || config.RootlessCgroups:
		return "no root"
	}
	for _, m := range config.Mounts {
		if m.Extensions != 0 {
			return "a copy of what is below the mount on " + m.Destination // by way of the node's /tmp
		}
	}
	for _, d := range config.Devices {
		if !strings.HasPrefix(filepath.Clean(d.Path), "/dev/") {
			return "a device on " + d.Path // in a user namespace the node's is bound, by this path
		}
	}
	return ""
}

// findOtherLibrary says which library of this program is not in nodeTrees.
func findOtherLibrary() string {
	maps, err := os.ReadFile("/proc/self/maps")
	if err != nil {
		return err.Error()
	}
	program, err := os.Readlink("/proc/self/exe")
	if err != nil {
		return err.Error()
	}
	for mapping := range strings.Lines(string(maps)) {
		_, file, _ := strings.Cut(strings.TrimSpace(mapping), "/")
		inTree := func(tree string) bool { return isBelow("/"+file, tree) }
		if file != "" && "/"+file != program && strings.Contains(mapping, " r-xp ") && !slices.ContainsFunc(nodeTrees[:], inTree) {
			return "the library /" + file
		}
	}
	return ""
}

func appendExisting(paths []mountedPath, path string, recursive bool) []mountedPath {
	if _, err := os.Stat(path); err != nil {
		return paths
	}
	return append(paths, mountedPath{path, recursive})
}

// withoutThoseBelow sorts the paths and leaves out what is there with one of nodeTrees.
// Nothing is mounted below anything else: if that is shared with the node the
// node would have it too.
func withoutThoseBelow(paths []mountedPath) (kept []mountedPath, why string) {
	slices.SortFunc(paths, func(a, b mountedPath) int { return cmp.Compare(a.path, b.path) })
	for _, p := range paths {
		if p.path != filepath.Clean(p.path) || !filepath.IsAbs(p.path) || p.path == "/" {
			return nil, fmt.Sprintf("%q is bound", p.path)
		}
		of := slices.IndexFunc(kept, func(k mountedPath) bool { return isBelow(p.path, k.path) })
		switch {
		case of < 0:
			kept = append(kept, p)
		case kept[of].path == p.path:
			kept[of].recursive = kept[of].recursive || p.recursive
		case !slices.Contains(nodeTrees[:], kept[of].path):
			return nil, fmt.Sprintf("%s is below %s", p.path, kept[of].path)
		}
	}
	if len(kept) > maxTrees {
		return nil, fmt.Sprintf("there are %d of them", len(kept))
	}
	return kept, ""
}

// isBelow reports whether the path is that of the directory or of something in it.
func isBelow(path, dir string) bool {
	return path == dir || strings.HasPrefix(path, dir+"/")
}
