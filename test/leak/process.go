package leak

import (
	"bytes"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/moby/sys/mountinfo"
	"github.com/vishvananda/netlink"

	"github.com/minicri/minicri/internal/process"
)

// addProcesses adds the processes that run one of the executables, that descend from one of the ancestors, or
// that carry one of the marks.
func (s Snapshot) addProcesses(scope Scope) error {
	if len(scope.Executables) == 0 && len(scope.Ancestors) == 0 && len(scope.Marks) == 0 {
		return nil
	}
	pids, err := processIDs()
	all := make(map[int]process.Stat)
	for _, pid := range pids {
		stat, statErr := process.ReadStat(pid)
		switch {
		case statErr == nil:
			all[pid] = stat
		case !errors.Is(statErr, process.ErrGone):
			err = errors.Join(err, statErr)
		}
	}
	waiting := make(map[int]bool) // by supervisor
	for pid, stat := range all {
		if slices.Contains(scope.Except, pid) {
			continue
		}
		// One starter waits ready for each supervisor; a second one is left behind.
		line, _ := os.ReadFile(fmt.Sprintf("/proc/%d/cmdline", pid))
		if slices.Contains(scope.Except, stat.Parent) && !waiting[stat.Parent] && string(line) == "minicri-shim\x00start\x00" {
			waiting[stat.Parent] = true
			continue
		}
		if runs(pid, scope.Executables) || descends(stat, scope.Ancestors, all) || carries(pid, scope.Marks) {
			// Pid and start are unique.
			s.add(Process, fmt.Sprintf("%s pid %d started %d", command(pid), pid, stat.StartTime), "", fmt.Sprintf("state %c, parent %d", stat.State, stat.Parent))
		}
	}
	return err
}

// runs: a deleted executable keeps its path, with a remark behind it; one that was in memory only has a
// remark in front, too.
func runs(pid int, executables []string) bool {
	path, _ := os.Readlink(fmt.Sprintf("/proc/%d/exe", pid))
	base := strings.TrimPrefix(filepath.Base(strings.TrimSuffix(path, " (deleted)")), "memfd:")
	return slices.Contains(executables, base) || slices.Contains(executables, command(pid))
}

func carries(pid int, marks []string) bool {
	for _, name := range []string{"cmdline", "environ", "cgroup"} {
		text, _ := os.ReadFile(fmt.Sprintf("/proc/%d/%s", pid, name))
		if slices.ContainsFunc(marks, func(mark string) bool { return bytes.Contains(text, []byte(mark)) }) {
			return true
		}
	}
	return false
}

func descends(p process.Stat, ancestors []int, all map[int]process.Stat) bool {
	for range all { // pids that were reused while they were read could make a circle
		if slices.Contains(ancestors, p.Parent) {
			return true
		}
		parent, ok := all[p.Parent]
		if !ok {
			return false
		}
		p = parent
	}
	return false
}

func processIDs() (pids []int, err error) {
	entries, err := os.ReadDir("/proc")
	for _, entry := range entries {
		if pid, err := strconv.Atoi(entry.Name()); err == nil {
			pids = append(pids, pid)
		}
	}
	return pids, err
}

func command(pid int) string {
	name, _ := os.ReadFile(fmt.Sprintf("/proc/%d/comm", pid))
	return strings.TrimSpace(string(name))
}

// addLinks adds the network interfaces of the calling thread's network namespace. The index belongs to the
// name: a link made anew is another link.
func (s Snapshot) addLinks(wanted bool) error {
	if !wanted {
		return nil
	}
	var links []netlink.Link
	var err error
	for range 10 { // the table changes during the answer while pods come and go
		if links, err = netlink.LinkList(); !errors.Is(err, netlink.ErrDumpInterrupted) {
			break
		}
	}
	for _, link := range links {
		s.add(Link, fmt.Sprintf("%s (%d)", link.Attrs().Name, link.Attrs().Index), "", link.Type())
	}
	return err
}

// addMounts adds the mounts at or below the prefixes. Two on one another have one name and count as two.
func (s Snapshot) addMounts(prefixes []string) error {
	mounts, err := mountinfo.GetMounts(func(m *mountinfo.Info) (skip, stop bool) {
		return !slices.ContainsFunc(prefixes, func(prefix string) bool { skip, _ := mountinfo.PrefixFilter(prefix)(m); return !skip }), false
	})
	for _, m := range mounts {
		s.add(Mount, m.Mountpoint, "", m.FSType+" of "+m.Source)
	}
	return err
}

// addCgroups adds the cgroups at and below the parents in every hierarchy that is mounted: one with cgroup v2, up to
// a dozen with v1 or hybrid. A cgroup that is gone from the one and left in the other is a leak too.
func (s Snapshot) addCgroups(parents []string) error {
	hierarchies, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	for _, hierarchy := range hierarchies {
		for _, parent := range parents {
			err = errors.Join(err, walk(filepath.Join(hierarchy.Mountpoint, parent), func(path string, entry fs.DirEntry) {
				if entry.IsDir() {
					s.add(Cgroup, strings.TrimPrefix(path, hierarchy.Mountpoint), hierarchy.Mountpoint, "")
				}
			}))
		}
	}
	return err
}

// addNamespaces adds the namespaces of the given types that processes in sight hold, each one once: by being
// in it with a thread, or by a descriptor. One held by a mount alone is a mount, and found as one.
func (s Snapshot) addNamespaces(types []string) error {
	if len(types) == 0 {
		return nil
	}
	pids, err := processIDs()
	holders := make(map[string]string)
	for _, pid := range pids {
		for _, namespace := range namespacesOf(pid, types) {
			holders[namespace] = fmt.Sprintf("held by %s, pid %d", command(pid), pid)
		}
	}
	for namespace, holder := range holders {
		s.add(Namespace, namespace, "", holder)
	}
	return err
}

// namespacesOf returns names as the kernel writes them: "net:[4026531840]". Each thread has a namespace of
// its own: Go programs lock a thread to enter another.
func namespacesOf(pid int, types []string) (found []string) {
	for _, kind := range types {
		found = append(found, linksOf(fmt.Sprintf("/proc/%d/task/*/ns/%s", pid, kind))...)
	}
	for _, target := range linksOf(fmt.Sprintf("/proc/%d/fd/*", pid)) {
		if kind, _, is := strings.Cut(target, ":["); is && slices.Contains(types, kind) {
			found = append(found, target)
		}
	}
	return found
}

// linksOf returns the targets of the links that can be read.
func linksOf(pattern string) (targets []string) {
	paths, _ := filepath.Glob(pattern)
	for _, path := range paths {
		if target, err := os.Readlink(path); err == nil {
			targets = append(targets, target)
		}
	}
	return targets
}

// addDescriptors adds the open descriptors of processes by their targets, not by their numbers, and by command, not
// by pid: so a daemon can be compared with what it was before a restart. A process that is gone holds nothing.
func (s Snapshot) addDescriptors(pids []int, kept []string) {
	for _, pid := range pids {
		for _, target := range linksOf(fmt.Sprintf("/proc/%d/fd/*", pid)) {
			// The inode of a socket or pipe is new for each: they count by number.
			if kind, _, _ := strings.Cut(target, ":["); kind == "socket" || kind == "pipe" {
				target = kind
			}
			if !slices.Contains(kept, target) {
				s.add(Descriptor, target, command(pid), fmt.Sprintf("pid %d", pid))
			}
		}
	}
}
