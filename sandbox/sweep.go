package sandbox

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

// Remains are the places where a sandbox leaves things that carry our mark.
type Remains struct {
	Netns, Userns *namespace.Dir
	Hierarchies   cgroup.Hierarchies
	// Node is whose things they are, State the volatile directory.
	Node  *node.Node
	State string
	// Attached tells whether CNI DEL is still to run for an id, which wants
	// the network namespace.
	Attached func(id string) bool
	// Kill is how long a process may take to go after SIGKILL.
	Kill time.Duration
}

// Stray is something that carries our mark and belongs to no sandbox.
type Stray struct {
	// Kind is netns, userns, cgroup or files.
	Kind string `json:"kind"`
	// Name is its path.
	Name string `json:"name"`
	id   string
}

// Find looks for what no sandbox explains. An id is known before anything of
// its sandbox is made and until all of it is gone, so what is listed first and
// unknown then is nobody's.
func (r *Remains) Find(exists func(id string) bool) ([]Stray, error) {
	var strays []Stray
	var errs []error
	for _, look := range []func() ([]Stray, error){r.cgroups, r.netns, r.userns, r.files} {
		found, err := look()
		errs = append(errs, err)
		for _, stray := range found {
			if !exists(stray.id) {
				strays = append(strays, stray)
			}
		}
	}
	if err := errors.Join(errs...); err != nil {
		return strays, fmt.Errorf("look for what has no record: %w", err)
	}
	return strays, nil
}

func (r *Remains) cgroups() ([]Stray, error) {
	paths, err := r.Hierarchies.Find(r.Node.Mark(), r.Node.Parents())
	var strays []Stray
	for _, path := range paths {
		id := strings.TrimPrefix(filepath.Base(path), r.Node.Mark())
		strays = append(strays, Stray{"cgroup", path, strings.TrimSuffix(id, ".scope")})
	}
	return strays, err
}

func (r *Remains) netns() ([]Stray, error) {
	strays, err := pinned("netns", r.Netns)
	return slices.DeleteFunc(strays, func(s Stray) bool { return r.Attached(s.id) }), err
}

func (r *Remains) userns() ([]Stray, error) { return pinned("userns", r.Userns) }

func pinned(kind string, namespaces *namespace.Dir) ([]Stray, error) {
	ids, err := namespaces.IDs()
	var strays []Stray
	for _, id := range ids {
		strays = append(strays, Stray{kind, namespaces.Path(id), id})
	}
	return strays, err
}

func (r *Remains) files() ([]Stray, error) {
	var strays []Stray
	for _, dir := range []string{sandboxesDir(r.State), runtimeDir(r.State)} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return strays, err
		}
		for _, entry := range entries {
			strays = append(strays, Stray{"files", filepath.Join(dir, entry.Name()), entry.Name()})
		}
	}
	return strays, nil
}

// Remove takes one stray thing back.
func (r *Remains) Remove(stray Stray) error {
	switch stray.Kind {
	case "cgroup":
		return r.Hierarchies.Remove(stray.Name, r.Kill)
	case "netns":
		return r.Netns.Remove(stray.id)
	case "userns":
		return r.Userns.Remove(stray.id)
	default:
		return removeDir(stray.Name)
	}
}

func (s *Store) remains() *Remains {
	o := s.options
	return &Remains{
		Netns: o.Netns, Userns: o.Userns, Hierarchies: o.Hierarchies, Node: o.Node, State: o.State,
		Attached: o.Networks.Attached, Kill: o.Limits.Kill,
	}
}

// sweep removes what carries our mark and has no record: what is left of a
// sandbox whose record was lost or set aside. Find lists cgroups first: the
// processes in them hold the rest.
func (s *Store) sweep() {
	remains := s.remains()
	strays, err := remains.Find(s.explains)
	if err != nil {
		s.options.Logger.Error("sweep", "err", err)
	}
	for _, stray := range strays {
		if err := remains.Remove(stray); err != nil {
			s.options.Logger.Error("what has no record could not be removed", "kind", stray.Kind, "name", stray.Name, "err", err)
			continue
		}
		s.options.Logger.Warn("removed what had no record", "kind", stray.Kind, "name", stray.Name)
	}
}
