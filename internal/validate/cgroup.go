package validate

import (
	"fmt"
	"path"
	"strings"

	"github.com/containerd/errdefs"
)

// checkCgroupParent reports why a cgroup parent cannot be used with the driver.
func checkCgroupParent(parent string, systemd bool) error {
	for _, element := range strings.Split(parent, "/") {
		if element == ".." {
			return fmt.Errorf("%q has an element '..'", parent)
		}
	}
	if err := CgroupName(parent); err != nil {
		return err
	}
	if strings.Contains(parent, ":") {
		return fmt.Errorf("%q has a character that a cgroup parent cannot have", parent)
	}
	if systemd && parent != "" && !strings.HasSuffix(path.Base(parent), ".slice") {
		return fmt.Errorf("%q is not a slice, but the cgroup driver is systemd: kubelet and runtime have to use the same driver", parent)
	}
	return nil
}

// longestElement is NAME_MAX, in bytes.
const longestElement = 255

// CgroupName reports why there can be no cgroup of that name, a path or what a driver
// makes one of: what could not be looked for could not be removed either.
func CgroupName(name string) error {
	if strings.ContainsRune(name, 0) {
		return fmt.Errorf("%q has a NUL character: %w", name, errdefs.ErrInvalidArgument)
	}
	for _, element := range strings.Split(name, "/") {
		if len(element) > longestElement {
			return fmt.Errorf("an element of %.300q has %d bytes, more than %d: %w", name, len(element), longestElement, errdefs.ErrInvalidArgument)
		}
	}
	return nil
}
