package supervisor

import (
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
)

// update sets resources: all that are named or, with an error, none.
func (c *container) update(encoded []byte) error {
	wanted := new(specs.LinuxResources)
	if err := json.Unmarshal(encoded, wanted); err != nil {
		return fmt.Errorf("update container %s: %w: %w", c.record.ID, errdefs.ErrInvalidArgument, err)
	}
	c.op.Lock()
	defer c.op.Unlock()
	if c.state().Exit != nil {
		return fmt.Errorf("update container %s: it has ended: %w", c.record.ID, errdefs.ErrFailedPrecondition)
	}
	if err := c.runtime.Update(wanted); err != nil {
		return fmt.Errorf("update container %s: %w", c.record.ID, err)
	}
	return nil
}
