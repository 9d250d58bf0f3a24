// Package sweep finds and removes orphans: what carries the node's mark, or lies
// in its directories, and belongs to no pod and no container. The daemon sweeps
// at its start, `minicri check` looks and sweeps with --fix; both use the same
// list of places.
//
// The package keeps no state and takes no locks. An id is known before anything
// of its pod or container is made and until all of it is gone, so an orphan is
// what was listed first and had no owner when it was asked for afterwards.
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

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/namespace"
)

// Kind is a kind of thing that pods and containers leave.
type Kind string

// The kinds, in the order in which they are removed: processes hold the rest.
const (
	ContainerCgroup Kind = "container cgroup"
	PodCgroup       Kind = "pod cgroup"
	ContainerFiles  Kind = "container files"
	ContainerFacts  Kind = "container facts"
	Volumes         Kind = "container volumes"
	Netns           Kind = "netns"
	Userns          Kind = "userns"
	PodFiles        Kind = "pod files"
	PodFacts        Kind = "pod facts"
)

// Orphan is something that belongs to no pod and no container.
type Orphan struct {
	Kind Kind
	// Path is where it is; ID is the id of the container or, for all other
	// kinds, of the pod that it was made for.
	Path, ID string
}

// Owner is what an orphan would belong to: "container" or "pod".
func (o Orphan) Owner() string {
	switch o.Kind {
	case ContainerCgroup, ContainerFiles, ContainerFacts, Volumes:
		return "container"
	default:
		return "pod"
	}
}

// Places are where pods and containers of a node leave things.
type Places struct {
	Node        *node.Node
	Hierarchies cgroup.Hierarchies
	// Netns and Userns have the pinned namespaces.
	Netns, Userns *namespace.Dir
	// Root is the durable directory, State the volatile one.
	Root, State string
	// Kill is how long a process may take to end after SIGKILL.
	Kill time.Duration
}

// Owners report whether an id is in use, or was by a record that cannot be read:
// then nothing of it is touched.
type Owners struct {
	Pod, Container func(id string) bool
	// Attached reports whether CNI DEL is still to run for a pod, which needs
	// its network namespace.
	Attached func(id string) bool
}

// Find returns the orphans in the order in which Remove is to be called. Beside
// an error they are those of the places that could be read.
func (p *Places) Find(owners Owners) (orphans []Orphan, err error) {
	inNetns := func(id string) bool { return owners.Pod(id) || owners.Attached(id) }
	var errs []error
	for _, place := range []struct {
		kind  Kind
		owned func(id string) bool
		list  func() (paths []string, err error)
		// Around an id are, in the name of a path, these.
		prefix, suffix string
	}{
		{ContainerCgroup, owners.Container, p.cgroups(p.Node.ContainerMark()), p.Node.ContainerMark(), ".scope"},
		{PodCgroup, owners.Pod, p.cgroups(p.Node.Mark()), p.Node.Mark(), ".scope"},
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
			// What has no mark is ours if it has the name of an id. What has gone with its owner
			// since it was listed is no orphan.
			ours := place.prefix != "" || len(id) == 64 && strings.Trim(id, "0123456789abcdef") == ""
			if ours && !place.owned(id) && p.exists(place.kind, path) {
				orphans = append(orphans, Orphan{place.kind, path, id})
			}
		}
	}
	return orphans, errors.Join(errs...)
}

func (p *Places) exists(kind Kind, path string) bool {
	if kind == ContainerCgroup || kind == PodCgroup {
		return p.Hierarchies.Exists(path)
	}
	_, err := os.Lstat(path)
	return !errors.Is(err, os.ErrNotExist)
}

func (p *Places) cgroups(mark string) func() ([]string, error) {
	return func() ([]string, error) { return p.Hierarchies.Find(mark, p.Node.Parents()) }
}

func pinned(namespaces *namespace.Dir) func() ([]string, error) {
	return func() (paths []string, err error) {
		ids, err := namespaces.IDs()
		for _, id := range ids {
			paths = append(paths, namespaces.Path(id))
		}
		return paths, err
	}
}

// in lists what is in a directory, which may not be there.
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

// Remove removes an orphan by what the kernel and the disk show, without a
// daemon. The snapshot below a container's files stays: it is the image store's,
// which removes it with its daemon's next start.
func (p *Places) Remove(o Orphan) error {
	switch o.Kind {
	case ContainerCgroup, PodCgroup:
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

// unmountAll unmounts what is mounted at a directory and below it, the topmost
// mount first.
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
