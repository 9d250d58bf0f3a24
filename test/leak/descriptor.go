package leak

import (
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
)

// addDescriptors adds the open descriptors of processes by their targets, not
// by their numbers, and by command, not by pid: so a daemon can be compared
// with what it was before a restart.
func (s Snapshot) addDescriptors(pids []int, kept []string) error {
	for _, pid := range pids {
		dir := fmt.Sprintf("/proc/%d/fd", pid)
		// A process that is gone holds nothing.
		entries, err := os.ReadDir(dir)
		if err != nil && !gone(err) {
			return err
		}
		name := command(pid)
		for _, entry := range entries {
			target, err := os.Readlink(filepath.Join(dir, entry.Name()))
			// The descriptor by which ReadDir read our own directory is closed.
			if err == nil && !slices.Contains(kept, target) {
				s.add(Descriptor, targetName(target), name, fmt.Sprintf("pid %d", pid))
			}
		}
	}
	return nil
}

// targetName drops the inode of sockets and pipes: it is new for each, and two
// idle moments of a daemon have the same number of them, not the same ones.
func targetName(target string) string {
	for _, kind := range []string{"socket", "pipe"} {
		if strings.HasPrefix(target, kind+":[") {
			return kind
		}
	}
	return target
}

// readLinks returns the targets of the links that can be read.
func readLinks(paths []string) []string {
	var targets []string
	for _, path := range paths {
		if target, err := os.Readlink(path); err == nil {
			targets = append(targets, target)
		}
	}
	return targets
}
