package stats

import (
	"errors"
	"fmt"
	"path/filepath"
	"slices"
	"strings"

	"github.com/moby/sys/mountinfo"
)

// hierarchies are where the controllers are mounted; "" for one that is not.
// With version 2 alone only unified is set.
type hierarchies struct {
	cpu, cpuacct, memory, pids, blkio, hugetlb string
	unified                                    string
}

// findHierarchies reads them from the mount table. Of a hierarchy that is
// mounted several times, the first counts.
func findHierarchies() (hierarchies, error) {
	mounts, err := mountinfo.GetMounts(mountinfo.FSTypeFilter("cgroup", "cgroup2"))
	if err != nil {
		return hierarchies{}, fmt.Errorf("find the cgroup hierarchies: %w", err)
	}
	var h hierarchies
	for _, m := range mounts {
		h.take(m)
	}
	if h.unified == "" && h.cpuacct == "" && h.memory == "" {
		return hierarchies{}, errors.New("no cgroup hierarchy is mounted: mount cgroup2 on /sys/fs/cgroup")
	}
	return h, nil
}

func (h *hierarchies) take(m *mountinfo.Info) {
	if m.FSType == "cgroup2" {
		setFirst(&h.unified, m.Mountpoint)
		return
	}
	controllers := strings.Split(m.VFSOptions, ",")
	for name, where := range map[string]*string{
		"cpu": &h.cpu, "cpuacct": &h.cpuacct, "memory": &h.memory, "pids": &h.pids, "blkio": &h.blkio, "hugetlb": &h.hugetlb,
	} {
		if slices.Contains(controllers, name) {
			setFirst(where, m.Mountpoint)
		}
	}
}

func setFirst(where *string, value string) {
	if *where == "" {
		*where = value
	}
}

// version2 reports whether a controller is not on version 1, and so on version 2
// if anywhere.
func version2(hierarchy string) bool { return hierarchy == "" }

// dir is a cgroup in a hierarchy. Cleaned as a rooted path, it never leads out.
func dir(hierarchy, path string) string {
	return filepath.Join(hierarchy, filepath.Clean("/"+path))
}
