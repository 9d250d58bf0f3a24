package sandbox

import (
	"errors"
	"os"
	"path/filepath"
	"strings"

)

// Stray is something that carries our mark and belongs to no sandbox.
type Stray struct {
	// Kind is netns, userns, cgroup or files.
	Kind string `json:"kind"`
	// Name is its path.
	Name string `json:"name"`
	id   string
}

// Strays looks for what no record explains. An id is known before anything of
// its sandbox is made and until all of it is gone, so what is listed first and
// unknown then is nobody's.
func (s *Sandboxes) Strays() ([]Stray, error) {
	var strays []Stray
	add := func(kind, id, name string) {
		strays = append(strays, Stray{Kind: kind, Name: name, id: id})
	}
	netns, err := s.options.Netns.IDs()
	for _, id := range netns {
		add("netns", id, s.options.Netns.Path(id))
	}
	userns, usernsErr := s.options.Userns.IDs()
	for _, id := range userns {
		add("userns", id, s.options.Userns.Path(id))
	}
	cgroups, cgroupErr := s.options.Hierarchies.Find(s.options.Mark)
	for _, path := range cgroups {
		id := strings.TrimPrefix(filepath.Base(path), s.options.Mark)
		add("cgroup", strings.TrimSuffix(id, ".scope"), path)
	}
	files, filesErr := s.fileIDs()
	for _, id := range files {
		add("files", id, s.Dir(id))
	}
	unknown := strays[:0]
	for _, stray := range strays {
		if !s.exists(stray.id) {
			unknown = append(unknown, stray)
		}
	}
	return unknown, errors.Join(err, usernsErr, cgroupErr, filesErr)
}

// fileIDs are the ids that have files in the volatile directory.
func (s *Sandboxes) fileIDs() ([]string, error) {
	var ids []string
	for _, dir := range []string{s.Dir(""), s.runtimeRoot()} {
		entries, err := os.ReadDir(dir)
		if err != nil && !errors.Is(err, os.ErrNotExist) {
			return nil, err
		}
		for _, entry := range entries {
			ids = append(ids, entry.Name())
		}
	}
	return ids, nil
}

// RemoveStray takes one stray thing back.
func (s *Sandboxes) RemoveStray(stray Stray) error {
	switch stray.Kind {
	case "netns":
		return s.options.Netns.Remove(stray.id)
	case "userns":
		return s.options.Userns.Remove(stray.id)
	case "cgroup":
		return s.options.Hierarchies.Remove(stray.Name, s.options.Limits.Kill)
	default:
		return errors.Join(s.removeFiles(stray.id), os.RemoveAll(filepath.Join(s.runtimeRoot(), stray.id)))
	}
}

// sweep removes what carries our mark and has no record: what is left of a
// sandbox whose record was lost or set aside. Cgroups come first: the
// processes in them hold the rest.
func (s *Sandboxes) sweep() {
	strays, err := s.Strays()
	if err != nil {
		s.options.Logger.Error("search for what has no record", "err", err)
	}
	for _, cgroupsFirst := range []bool{true, false} {
		for _, stray := range strays {
			if (stray.Kind == "cgroup") != cgroupsFirst {
				continue
			}
			err := s.RemoveStray(stray)
			s.options.Logger.Warn("removed what had no record", "kind", stray.Kind, "name", stray.Name, "err", err)
		}
	}
}

