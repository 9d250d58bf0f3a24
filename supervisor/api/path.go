package api

import "path/filepath"

// PathGuard stands in the path of a log between what belongs to the owner of the
// node and what others may write, such as a log agent that has /var/log/pods
// mounted. To everybody else it means nothing (path_resolution(7)).
const PathGuard = "/./"

// GuardedPath is the path of name in base. A log that is opened by it is below
// base and behind no symbolic link there; base itself may have some.
func GuardedPath(base, name string) string {
	return filepath.Clean(base) + PathGuard + filepath.Clean(name)
}
