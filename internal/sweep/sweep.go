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
	"slices"
	"strings"
	"time"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/namespace"
)

// Kind is a kind of thing that pods and containers leave.
type Kind string

// The kinds, in the order in which they are removed: processes hold the rest.
const (
	ContainerCgroup Kind = "container cgroup"
	PodCgroup       Kind = "pod cgroup"
	ContainerFiles  Kind = "container files"
	Volumes         Kind = "container volumes"
	Netns           Kind = "netns"
	Userns          Kind = "userns"
	PodFiles        Kind = "pod files"
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
	case ContainerCgroup, ContainerFiles, Volumes:
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

// place is where things of one kind are.
type place struct {
	kind  Kind
	owned func(id string) bool
	list  func() ([]Orphan, error)
}

// Find returns the orphans in the order in which Remove is to be called. Beside
// an error they are those of the places that could be read.
func (p *Places) Find(owners Owners) ([]Orphan, error) {
	var orphans []Orphan
	var errs []error
	for _, place := range p.places(owners) {
		found, err := place.list()
		if err != nil {
			errs = append(errs, fmt.Errorf("list each %s: %w", place.kind, err))
		}
		for _, o := range found {
			if !place.owned(o.ID) {
				orphans = append(orphans, Orphan{place.kind, o.Path, o.ID})
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return orphans, fmt.Errorf("look for orphans: %w", err)
	}
	return orphans, nil
}

func (p *Places) places(owners Owners) []place {
	in := func(directories ...string) func() ([]Orphan, error) {
		return func() ([]Orphan, error) { return entries(filepath.Join(directories...)) }
	}
	inNetns := func(id string) bool { return owners.Pod(id) || owners.Attached(id) }
	return []place{
		{ContainerCgroup, owners.Container, func() ([]Orphan, error) { return p.cgroups(p.Node.ContainerMark()) }},
		{PodCgroup, owners.Pod, func() ([]Orphan, error) { return p.cgroups(p.Node.Mark()) }},
		{ContainerFiles, owners.Container, withID(in(p.State, "containers"))},
		{Volumes, owners.Container, withID(in(p.Root, "container-volumes"))},
		{Netns, inNetns, func() ([]Orphan, error) { return pinned(p.Netns) }},
		{Userns, owners.Pod, func() ([]Orphan, error) { return pinned(p.Userns) }},
		{PodFiles, owners.Pod, in(p.State, "sandboxes")},
	}
}

func (p *Places) cgroups(mark string) (found []Orphan, err error) {
	paths, err := p.Hierarchies.Find(mark, p.Node.Parents())
	for _, path := range paths {
		id := strings.TrimPrefix(filepath.Base(path), mark)
		found = append(found, Orphan{Path: path, ID: strings.TrimSuffix(id, ".scope")})
	}
	return found, err
}

func pinned(namespaces *namespace.Dir) (found []Orphan, err error) {
	ids, err := namespaces.IDs()
	for _, id := range ids {
		found = append(found, Orphan{Path: namespaces.Path(id), ID: id})
	}
	return found, err
}

// entries lists what is in a directory, which may not be there.
func entries(dir string) (found []Orphan, err error) {
	list, err := os.ReadDir(dir)
	if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, err
	}
	for _, entry := range list {
		found = append(found, Orphan{Path: filepath.Join(dir, entry.Name()), ID: entry.Name()})
	}
	return found, nil
}

// withID keeps what is named by an id.
func withID(list func() ([]Orphan, error)) func() ([]Orphan, error) {
	return func() ([]Orphan, error) {
		found, err := list()
		return slices.DeleteFunc(found, func(o Orphan) bool {
			return len(o.ID) != 64 || strings.Trim(o.ID, "0123456789abcdef") != ""
		}), err
	}
}
