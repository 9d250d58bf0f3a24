package leak

import (
	"io/fs"
	"path/filepath"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// addCgroups adds the cgroups at and below the parents in every hierarchy that
// is mounted: one with cgroup v2, up to a dozen with v1 or hybrid. A cgroup
// that is gone from the one and left in the other is a leak too.
func (s Snapshot) addCgroups(parents []string) error {
	if len(parents) == 0 {
		return nil
	}
	hierarchies, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return err
	}
	for _, hierarchy := range hierarchies {
		for _, parent := range parents {
			if err := s.addCgroupTree(hierarchy.Mountpoint, parent); err != nil {
				return err
			}
		}
	}
	return nil
}

func (s Snapshot) addCgroupTree(hierarchy, parent string) error {
	return walk(filepath.Join(hierarchy, parent), func(path string, entry fs.DirEntry) {
		if entry.IsDir() {
			s.add(Cgroup, strings.TrimPrefix(path, hierarchy), hierarchy, "")
		}
	})
}
