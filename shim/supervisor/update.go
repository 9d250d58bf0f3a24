package supervisor

import (
	"encoding/json"
	"fmt"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"

	"github.com/minicri/minicri/shim/api"
)

// update sets resources: all that are named or, with an error, none.
func (c *container) update(r *api.UpdateRequest) error {
	wanted := new(specs.LinuxResources)
	if err := json.Unmarshal(r.Resources, wanted); err != nil {
		return fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, err)
	}
	c.op.Lock()
	defer c.op.Unlock()
	if c.state().Exit != nil {
		return fmt.Errorf("it has ended: %w", errdefs.ErrFailedPrecondition)
	}
	var oomScoreAdj *int
	if r.OomScoreAdj != nil {
		oomScoreAdj = new(int(*r.OomScoreAdj))
	}
	loaded, err := c.loaded()
	if err != nil {
		return err
	}
	return loaded.Update(wanted, oomScoreAdj)
}
