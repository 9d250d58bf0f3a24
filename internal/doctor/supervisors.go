package doctor

import (
	"fmt"
	"path/filepath"

	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/supervisor/client"
)

// supervisors names those of other builds than the one that the daemon would use.
func (c *checker) supervisors() {
	build, err := client.BuildOf(c.Shim)
	if err != nil {
		return // programs has said so
	}
	ids, err := state.IDs(c.recordDir())
	if err != nil {
		c.add("supervisors", Problem, err.Error(), "")
	}
	pods := make(map[string]int)
	for _, id := range ids {
		if record, err := state.Peek[sandbox.Record](c.recordDir(), id); err == nil { // else unread says so
			pods[record.Supervisor]++
		}
	}
	older, err := client.Older(filepath.Join(c.Config.State, "shims"), build, pods)
	if err != nil {
		c.add("supervisors", Problem, err.Error(), "")
	}
	for _, one := range older {
		message := fmt.Sprintf("build %s, version %s, has %d pods", one.Group, one.Version, one.Pods)
		if one.Problem != "" {
			c.add("supervisor", Problem, message+": "+one.Problem, fmt.Sprintf("install minicri %s again, and remove these pods before the next upgrade", one.Version))
			continue
		}
		c.add("supervisor", Good, message+": it ends with the last of them", "")
	}
}
