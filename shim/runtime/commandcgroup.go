package runtime

import (
	"errors"
	"fmt"
	"path/filepath"

	"github.com/opencontainers/cgroups"
)

// cgroupsOf are the cgroups of a process by controller, "" for version 2, as
// paths below the mount points.
func cgroupsOf(pid int) (map[string]string, error) {
	own, err := cgroups.ParseCgroupFile(fmt.Sprintf("/proc/%d/cgroup", pid))
	if err != nil {
		return nil, err
	}
	if cgroups.IsCgroup2UnifiedMode() {
		return map[string]string{"": filepath.Join("/sys/fs/cgroup", own[""])}, nil
	}
	found := make(map[string]string)
	for controller, path := range own {
		if controller == "" {
			continue // the hybrid hierarchy has no controllers
		}
		root, mountErr := cgroups.FindCgroupMountpoint("", controller)
		if cgroups.IsNotFound(mountErr) {
			continue // named hierarchies that are mounted nowhere
		}
		if mountErr != nil {
			err = errors.Join(err, mountErr)
			continue
		}
		found[controller] = filepath.Join(root, path)
	}
	return found, err
}
