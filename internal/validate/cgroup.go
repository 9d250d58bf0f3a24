package validate

import (
	"fmt"
	"path"
	"strings"
)

// checkCgroupParent reports why a cgroup parent cannot be used with the driver.
func checkCgroupParent(parent string, systemd bool) error {
	for _, element := range strings.Split(parent, "/") {
		if element == ".." {
			return fmt.Errorf("%q has an element '..'", parent)
		}
	}
	if strings.ContainsAny(parent, "\x00:") {
		return fmt.Errorf("%q has a character that a cgroup parent cannot have", parent)
	}
	if systemd && parent != "" && !strings.HasSuffix(path.Base(parent), ".slice") {
		return fmt.Errorf("%q is not a slice, but the cgroup driver is systemd: kubelet and runtime have to use the same driver", parent)
	}
	return nil
}
