package serve

import (
	"context"
	"fmt"

	"github.com/containerd/errdefs"

	"github.com/minicri/minicri/supervisor/api"
)

// update sets resources: all that are named or, with an error, none.
func (c *container) update(ctx context.Context, r *api.UpdateRequest) error {
	c.op.Lock()
	defer c.op.Unlock()
	if c.state().Exit != nil {
		return fmt.Errorf("it has ended: %w", errdefs.ErrFailedPrecondition)
	}
	var oomScoreAdj *int
	if r.OomScoreAdj != nil {
		oomScoreAdj = new(int(*r.OomScoreAdj))
	}
	ctx, done := c.bound(context.WithoutCancel(ctx)) // half an update is none
	defer done()
	return c.runtime.Update(ctx, r.Resources, oomScoreAdj)
}
