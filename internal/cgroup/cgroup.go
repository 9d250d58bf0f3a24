// Package cgroup finds, empties and removes the cgroups of pods.
//
// The supervisor, libcontainer and runtimes make the cgroups of pods; this package makes those of plugin
// runs. On v1 (cgroups(7)) a path stands once in each mounted hierarchy, on v2 once in all.
package cgroup

import (
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"os/exec"
	"path/filepath"
	"regexp"
	"slices"
	"strings"
	"syscall"
	"time"

	"github.com/containerd/errdefs"
	"github.com/moby/sys/mountinfo"
	"github.com/opencontainers/cgroups"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/process"
)

// Hierarchies are the mount points of all cgroup hierarchies of the machine.
type Hierarchies []string

// FindHierarchies reads them from the mount table.
func FindHierarchies() (Hierarchies, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return nil, fmt.Errorf("find the cgroup hierarchies: %w", err)
	}
	var found Hierarchies
	seen := make(map[string]bool)
	for _, m := range mounts {
		if key := fmt.Sprint(m.Major, m.Minor, m.Root); !seen[key] {
			seen[key] = true
			found = append(found, m.Mountpoint)
		}
	}
	if len(found) == 0 {
		return nil, errors.New("no cgroup hierarchy is mounted: mount cgroup2 on /sys/fs/cgroup")
	}
	return found, nil
}

// Unified reports whether the machine has version 2 alone.
func Unified() bool { return cgroups.IsCgroup2UnifiedMode() }

// Path turns a runtime-spec path into one below a hierarchy: systemd names scopes prefix-name.scope.
func Path(cgroupsPath string) string {
	parts := strings.Split(cgroupsPath, ":")
	if len(parts) != 3 {
		return cgroupsPath
	}
	return filepath.Join(expandSlice(parts[0]), parts[1]+"-"+parts[2]+".scope")
}

// expandSlice: the slice a-b.slice lives in a.slice (systemd.slice(5)).
func expandSlice(slice string) string {
	name := strings.TrimSuffix(slice, ".slice")
	if name == "-" || name == "" {
		return "/"
	}
	path, prefix := "/", ""
	for _, part := range strings.Split(name, "-") {
		path = filepath.Join(path, prefix+part+".slice")
		prefix += part + "-"
	}
	return path
}

// Processes are the processes in the cgroup and below it, in any hierarchy.
func (h Hierarchies) Processes(path string) (found []int, err error) {
	for _, hierarchy := range h {
		pids, err := Group{Dir: filepath.Join(hierarchy, path)}.Processes()
		if err != nil {
			return nil, err
		}
		found = append(found, pids...)
	}
	slices.Sort(found)
	return slices.Compact(found), nil
}

func ignoreGone(err error) error {
	if errors.Is(err, fs.ErrNotExist) || errors.Is(err, unix.ENODEV) {
		return nil
	}
	return err
}

// ErrBusy means that processes survive SIGKILL in uninterruptible sleep; the cgroup stays until they wake.
var ErrBusy = fmt.Errorf("processes remain in the cgroup after SIGKILL: %w", errdefs.ErrUnavailable)

const (
	scopeLimit = 3 * time.Second  // for systemd to remove a scope that is empty
	scopePause = time.Millisecond // between two looks at it
)

// Remove kills what runs in the cgroup, up to the limit, and removes it from every hierarchy, if it exists.
func (h Hierarchies) Remove(path string, limit time.Duration) error {
	// A cleaned rooted path never leads out of a hierarchy.
	path = filepath.Clean("/" + path)
	if path == "/" {
		return fmt.Errorf("remove cgroup %q: that is the root", path)
	}
	if !h.Exists(path) { // usually the supervisor has removed it
		return nil
	}
	deadline := time.Now().Add(limit)
	for _, hierarchy := range h {
		if err := (Group{Dir: filepath.Join(hierarchy, path), V2: Unified()}).Kill(time.Until(deadline)); err != nil {
			return err
		}
	}
	if strings.HasSuffix(path, ".scope") && Unified() {
		// systemd removes an empty scope and its unit, slowly while it is reloading. If the
		// cgroup is gone before it looks, it takes the scope for running, forever.
		for end := time.Now().Add(scopeLimit); h.Exists(path) && time.Now().Before(end); {
			time.Sleep(scopePause)
		}
	}
	var errs []error
	for _, hierarchy := range h {
		errs = append(errs, Group{Dir: filepath.Join(hierarchy, path)}.Remove())
	}
	return errors.Join(errs...)
}

// Exists reports whether any hierarchy has the cgroup.
func (h Hierarchies) Exists(path string) bool {
	return slices.ContainsFunc(h, func(hierarchy string) bool {
		_, err := os.Stat(filepath.Join(hierarchy, path))
		return err == nil
	})
}

// container is in the names of the cgroups of containers, of any runtime.
var container = regexp.MustCompile(`[0-9a-f]{64}|^minicri-`)

// Find lists the cgroups whose names are ours, as paths below any hierarchy. It searches below the parents, for "/"
// among its children, and not in cgroups of containers: a node in a container owns the cgroups there.
func (h Hierarchies) Find(ours func(name string) bool, parents []string) ([]string, error) {
	found := make(map[string]bool)
	for _, hierarchy := range h {
		for _, parent := range parents {
			top := filepath.Join(hierarchy, parent)
			err := filepath.WalkDir(top, func(path string, entry fs.DirEntry, err error) error {
				if err != nil {
					return ignoreGone(err)
				}
				if !entry.IsDir() || path == top {
					return nil
				}
				isOurs := ours(entry.Name())
				if isOurs {
					found[strings.TrimPrefix(path, hierarchy)] = true
				}
				if isOurs || parent == "/" || container.MatchString(entry.Name()) {
					return fs.SkipDir
				}
				return nil
			})
			if err != nil {
				return nil, fmt.Errorf("search the cgroups: %w", err)
			}
		}
	}
	return slices.Collect(maps.Keys(found)), nil
}

// Group is a cgroup in one hierarchy that only holds processes together. Nothing leaves it by a new
// session, group or environment, so all can be listed and ended. It limits nothing.
type Group struct {
	Dir string // its directory
	V2  bool   // whether the hierarchy is of version 2
}

// holding are the version 1 controllers to use, the best first. Other programs freeze processes by
// moving them to a freezer. A cpuset without processors takes no process.
var holding = []string{"pids", "devices", "blkio", "cpuacct", "memory", "freezer"}

// GroupParent finds where the groups of this process may be made: at path below a hierarchy, or in our
// own cgroup if path is "". It prefers version 2, where a process can be born in a cgroup.
func GroupParent(path string) (Group, error) {
	own, err := cgroups.ParseCgroupFile("/proc/self/cgroup")
	if err != nil {
		return Group{}, fmt.Errorf("find the cgroup of this process: %w", err)
	}
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return Group{}, fmt.Errorf("find the cgroup hierarchies: %w", err)
	}
	for _, m := range mounts {
		if m.FSType == "cgroup2" {
			return Group{Dir: below(m, path, own[""]), V2: true}, nil
		}
	}
	for _, controller := range holding {
		for _, m := range mounts {
			if m.FSType == "cgroup" && slices.Contains(strings.Split(m.VFSOptions, ","), controller) {
				return Group{Dir: below(m, path, own[controller])}, nil
			}
		}
	}
	return Group{}, errors.New("no cgroup hierarchy is mounted that holds processes: mount cgroup2 on /sys/fs/cgroup")
}

// below is the directory of a path, or of our own cgroup, in a mount that may show part of the hierarchy.
func below(m *mountinfo.Info, path, own string) string {
	if path != "" {
		return filepath.Join(m.Mountpoint, filepath.Clean("/"+path))
	}
	inside, err := filepath.Rel(m.Root, own)
	if err != nil || strings.HasPrefix(inside, "..") {
		return m.Mountpoint
	}
	return filepath.Join(m.Mountpoint, inside)
}

// Child returns the group of that name below this one; it does not make it.
func (g Group) Child(name string) Group { return Group{Dir: filepath.Join(g.Dir, name), V2: g.V2} }

// Make makes the cgroup and its missing parents.
func (g Group) Make() error {
	if err := os.MkdirAll(g.Dir, 0o755); err != nil {
		return fmt.Errorf("make a cgroup: %w", err)
	}
	return nil
}

// Start starts a command whose process is born in the cgroup.
func (g Group) Start(command *exec.Cmd) error {
	if !g.V2 {
		return g.startFromInside(command)
	}
	dir, err := os.Open(g.Dir)
	if err != nil {
		return fmt.Errorf("enter a cgroup: %w", err)
	}
	defer dir.Close()
	if command.SysProcAttr == nil {
		command.SysProcAttr = &syscall.SysProcAttr{}
	}
	command.SysProcAttr.UseCgroupFD, command.SysProcAttr.CgroupFD = true, int(dir.Fd())
	return command.Start()
}

// startFromInside is Start on version 1, where a process begins in the cgroup of its forking thread. A
// thread enters the cgroup and ends; until then Processes lists this process, which Kill leaves out.
func (g Group) startFromInside(command *exec.Cmd) error {
	return process.OnDisposableThread(func() error {
		if err := os.WriteFile(filepath.Join(g.Dir, "tasks"), []byte("0"), 0); err != nil {
			return fmt.Errorf("enter a cgroup: %w", err)
		}
		return command.Start()
	})
}

// Empty reports whether no process is inside or below; a missing cgroup is empty. On version 2
// cgroup.events leaves out zombies, unlike cgroup.procs, and counts the cgroups below.
func (g Group) Empty() (bool, error) {
	if !g.V2 {
		pids, err := g.Processes()
		return len(pids) == 0, err
	}
	events, err := os.ReadFile(filepath.Join(g.Dir, "cgroup.events"))
	if err = ignoreGone(err); err != nil {
		return false, err
	}
	return !strings.Contains(string(events), "populated 1"), nil
}

// Processes returns those inside and below; one of a foreign pid namespace is 0, as for the kernel.
func (g Group) Processes() ([]int, error) {
	var pids []int
	err := filepath.WalkDir(g.Dir, func(dir string, entry fs.DirEntry, err error) error {
		if err != nil {
			return ignoreGone(err)
		}
		if !entry.IsDir() {
			return nil
		}
		inside, err := cgroups.GetPids(dir)
		pids = append(pids, inside...)
		return ignoreGone(err)
	})
	if err != nil {
		return nil, fmt.Errorf("list the processes of cgroup %s: %w", g.Dir, err)
	}
	return pids, nil
}

// Kill sends SIGKILL to everything inside until nothing is left, up to the limit. What remains, frozen
// or in uninterruptible sleep, is ErrBusy with its pids.
func (g Group) Kill(limit time.Duration) error {
	deadline := time.Now().Add(limit)
	const first, most = time.Millisecond, 50 * time.Millisecond // between two looks
	for pause := first; ; pause = min(2*pause, most) {
		empty, err := g.Empty()
		if err != nil || empty {
			return err
		}
		pids, err := g.Processes()
		if err != nil {
			return err
		}
		// The kernel lists a process of another pid namespace as 0 (pid_namespaces(7)), which
		// kill(2) takes for our own process group.
		if slices.Contains(pids, 0) {
			return fmt.Errorf("cgroup %s: it has processes of another pid namespace: not touched", g.Dir)
		}
		if err := g.killOnce(pids); err != nil {
			return err
		}
		if time.Now().After(deadline) {
			return fmt.Errorf("cgroup %s, processes %v: %w", g.Dir, pids, ErrBusy)
		}
		time.Sleep(pause)
	}
}

// killOnce uses cgroup.kill (Linux 5.14), which no fork outruns, or signals one process after the other
// but this one, which is inside while it starts a command.
func (g Group) killOnce(pids []int) error {
	if g.V2 && os.WriteFile(filepath.Join(g.Dir, "cgroup.kill"), []byte("1"), 0) == nil {
		return nil
	}
	others := slices.DeleteFunc(pids, func(pid int) bool { return pid == os.Getpid() })
	_, err := process.SignalListed(others, g.Processes, unix.SIGKILL)
	return err
}

// Remove removes the cgroup and those below, which have to be empty. It is no error if there is none.
func (g Group) Remove() error {
	if err := cgroups.RemovePath(g.Dir); err != nil {
		return fmt.Errorf("remove cgroup %s: %w", g.Dir, err)
	}
	return nil
}
