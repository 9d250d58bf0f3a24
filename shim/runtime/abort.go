package runtime

import (
	"fmt"
	"syscall"

	"github.com/opencontainers/cgroups"
	"github.com/opencontainers/cgroups/manager"
)

// creating is where the processes of a creation are: in the cgroup, or on the way
// there.
type creating struct {
	group  *cgroups.Cgroup
	launch *launching // nil if there is none
}

// setCreating notes a creation; without a group it has ended.
func (b *Builtin) setCreating(id string, group *cgroups.Cgroup, launch *launching) {
	b.mu.Lock()
	defer b.mu.Unlock()
	if group == nil {
		delete(b.creating, id)
		return
	}
	b.creating[id] = creating{group, launch}
}

// Abort is of Runtime: hooks run as our children, or in the container's cgroup.
func (b *Builtin) Abort(id string) error {
	b.mu.Lock()
	created := b.creating[id]
	b.mu.Unlock()
	if created.group == nil {
		return nil
	}
	b.children.endHooks(id)
	if created.launch != nil {
		created.launch.abort()
	}
	m, err := manager.New(created.group)
	if err != nil {
		return fmt.Errorf("cgroups of container %s: %w", id, err)
	}
	return killCgroup(m.GetPaths(), "", syscall.SIGKILL)
}
