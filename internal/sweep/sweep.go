// Package sweep finds and removes orphans: what carries the node's mark or lies in its directories, and
// belongs to no pod and no container. The daemon does so at its start, and so does `minicri check --fix`.
//
// The package has no state and no locks. An ID is known from before anything of its pod or container exists
// until all of it is gone. So what is listed and then has no owner is an orphan.
package sweep

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"time"

	"github.com/moby/sys/mountinfo"
	"golang.org/x/sys/unix"

	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/state"
)

// Kind is a kind of orphan.
type Kind string

// The kinds are in the order of removal: processes hold the rest.
const (
	Cgroup         Kind = "cgroup"
	ContainerFiles Kind = "container files"
	ContainerFacts Kind = "container facts"
	Volumes        Kind = "container volumes"
	Netns          Kind = "netns"
	Userns         Kind = "userns"
	PodFiles       Kind = "pod files"
	PodFacts       Kind = "pod facts"
)

// Orphan belongs to no pod and no container.
type Orphan struct {
	Kind Kind
	// ID is that of the container or, for all other kinds, of the pod that it was made for.
	Path, ID string
}

// Owner names the kind of object that would own the orphan.
func (o Orphan) Owner() string {
	switch o.Kind {
	case Cgroup:
		return "pod or container"
	case ContainerFiles, ContainerFacts, Volumes:
		return "container"
	default:
		return "pod"
	}
}

// Places are where the node's pods and containers leave things.
type Places struct {
	Node          *node.Node
	Hierarchies   Cgroups
	Netns, Userns Namespaces
	Root, State   string
	// Kill limits how long processes may take to exit after SIGKILL.
	Kill time.Duration
}

// Cgroups finds and removes cgroups. cgroup.Hierarchies implements it.
type Cgroups interface {
	Find(ours func(name string) bool, parents []string) ([]string, error)
	Exists(path string) bool
	Remove(path string, limit time.Duration) error
}

// Namespaces lists and removes pinned namespaces. namespace.Dir implements it.
type Namespaces interface {
	IDs() ([]string, error)
	Path(id string) string
	Remove(id string) error
}

// Owners report whether an ID is in use, or may be by a record that cannot be read.
type Owners struct {
	Pod, Container func(id string) bool
	// Attached reports whether CNI DEL, which needs the network namespace, is still to run for a pod.
	Attached func(id string) bool
}

// Find returns the orphans in the order of removal, with an error those of the readable places.
func (p *Places) Find(owners Owners) (orphans []Orphan, err error) {
	inNetns := func(id string) bool { return owners.Pod(id) || owners.Attached(id) }
	inCgroup := func(id string) bool { return owners.Pod(id) || owners.Container(id) }
	var errs []error
	for _, place := range []struct {
		kind           Kind
		owned          func(id string) bool
		list           func() (paths []string, err error)
		prefix, suffix string
	}{
		{Cgroup, inCgroup, p.cgroups, "", ""},
		{ContainerFiles, owners.Container, in(p.State, "containers"), "", ""},
		{ContainerFacts, owners.Container, in(p.Root, "container-facts"), "", ".json"},
		{Volumes, owners.Container, in(p.Root, "container-volumes"), "", ""},
		{Netns, inNetns, pinned(p.Netns), p.Node.Mark(), ""},
		{Userns, owners.Pod, pinned(p.Userns), p.Node.Mark(), ""},
		{PodFiles, owners.Pod, in(p.State, "sandboxes"), "", ""},
		{PodFacts, owners.Pod, in(p.State, "facts"), "", ".json"},
	} {
		paths, err := place.list()
		if err != nil {
			errs = append(errs, fmt.Errorf("look for orphans: list each %s: %w", place.kind, err))
		}
		for _, path := range paths {
			id := strings.TrimSuffix(strings.TrimPrefix(filepath.Base(path), place.prefix), place.suffix)
			// Without a mark, only a name like an ID is ours. What has gone meanwhile is no orphan.
			ours := place.prefix != "" || node.IsID(id)
			if place.kind == Cgroup {
				id, ours = p.Node.OfCgroup(id)
			}
			if ours && !place.owned(id) && p.exists(place.kind, path) {
				orphans = append(orphans, Orphan{place.kind, path, id})
			}
		}
	}
	return orphans, errors.Join(errs...)
}

func (p *Places) exists(kind Kind, path string) bool {
	if kind == Cgroup {
		return p.Hierarchies.Exists(path)
	}
	_, err := os.Lstat(path)
	return !errors.Is(err, os.ErrNotExist)
}

func (p *Places) cgroups() ([]string, error) {
	ours := func(name string) bool { _, ours := p.Node.OfCgroup(name); return ours }
	return p.Hierarchies.Find(ours, p.Node.Parents())
}

func pinned(namespaces Namespaces) func() ([]string, error) {
	return func() (paths []string, err error) {
		ids, err := namespaces.IDs()
		for _, id := range ids {
			paths = append(paths, namespaces.Path(id))
		}
		return paths, err
	}
}

// in lists a directory that may be missing.
func in(directories ...string) func() ([]string, error) {
	return func() (paths []string, err error) {
		directory := filepath.Join(directories...)
		list, err := os.ReadDir(directory)
		if errors.Is(err, os.ErrNotExist) {
			return nil, nil
		}
		for _, entry := range list {
			paths = append(paths, filepath.Join(directory, entry.Name()))
		}
		return paths, err
	}
}

// Remove removes an orphan without a daemon, as the kernel and the disk show it. A container's snapshot
// stays: the daemon's image store removes it at the next start.
func (p *Places) Remove(o Orphan) error {
	switch o.Kind {
	case Cgroup:
		return p.Hierarchies.Remove(o.Path, p.Kill)
	case Netns:
		return p.Netns.Remove(o.ID)
	case Userns:
		return p.Userns.Remove(o.ID)
	}
	if err := unmountAll(o.Path); err != nil {
		return err
	}
	if err := state.RemoveAll(o.Path); err != nil {
		return fmt.Errorf("remove %s: %w", o.Kind, err)
	}
	return nil
}

// unmountAll unmounts everything at and below a directory, topmost mounts first.
func unmountAll(dir string) error {
	parent, err := filepath.EvalSymlinks(filepath.Dir(dir)) // as mountinfo shows it
	if errors.Is(err, os.ErrNotExist) {
		return nil
	}
	if err != nil {
		return err
	}
	mounts, err := mountinfo.GetMounts(mountinfo.PrefixFilter(filepath.Join(parent, filepath.Base(dir))))
	if err != nil {
		return err
	}
	for i := len(mounts) - 1; i >= 0; i-- {
		err := unix.Unmount(mounts[i].Mountpoint, unix.MNT_DETACH|unix.UMOUNT_NOFOLLOW)
		if err != nil && !errors.Is(err, unix.EINVAL) && !errors.Is(err, unix.ENOENT) { // unmounted meanwhile
			return fmt.Errorf("unmount %s: %w", mounts[i].Mountpoint, err)
		}
	}
	return nil
}
