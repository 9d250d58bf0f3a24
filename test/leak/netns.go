package leak

import (
	"fmt"
	"path/filepath"
	"slices"
	"strings"
)

// addNetnsFiles adds the files of directories of network namespaces, whether
// a namespace is still mounted on them or not.
func (s Snapshot) addNetnsFiles(dirs []string) error {
	return s.addEntries(NetnsFile, dirs, func(string) bool { return true })
}

// addNamespaces adds the namespaces of the given types that processes in sight
// hold, each one once: by being in it with a thread, or by a descriptor. A
// namespace held by a mount alone is a mount, and found as one.
func (s Snapshot) addNamespaces(types []string) error {
	if len(types) == 0 {
		return nil
	}
	pids, err := processIDs()
	if err != nil {
		return err
	}
	holders := make(map[string]string)
	for _, pid := range pids {
		for _, namespace := range namespacesOf(pid, types) {
			holders[namespace] = fmt.Sprintf("held by %s, pid %d", command(pid), pid)
		}
	}
	for namespace, holder := range holders {
		s.add(Namespace, namespace, "", holder)
	}
	return nil
}

// namespacesOf returns names as the kernel writes them: "net:[4026531840]".
// Each thread has a namespace of its own: Go programs lock a thread to enter
// another.
func namespacesOf(pid int, types []string) []string {
	var found []string
	for _, kind := range types {
		tasks, _ := filepath.Glob(fmt.Sprintf("/proc/%d/task/*/ns/%s", pid, kind))
		found = append(found, readLinks(tasks)...)
	}
	descriptors, _ := filepath.Glob(fmt.Sprintf("/proc/%d/fd/*", pid))
	for _, target := range readLinks(descriptors) {
		kind, _, isNamespace := strings.Cut(target, ":[")
		if isNamespace && slices.Contains(types, kind) {
			found = append(found, target)
		}
	}
	return found
}
