package client

import (
	"context"

	"github.com/minicri/minicri/supervisor/api"
)

// Events calls each for every event after a sequence number (0: all that are
// kept), on the caller's goroutine, until ctx ends, each fails or the supervisor is
// gone. A gap in the numbers says that events were dropped: List then.
func (c *Client) Events(ctx context.Context, after uint64, each func(*api.Event) error) error {
	ctx, call, done, err := c.open(ctx)
	if err != nil {
		return err
	}
	defer done()
	stream, err := call.Events(ctx, &api.EventsRequest{After: after})
	if err != nil {
		return native(err)
	}
	for {
		event, err := stream.Recv()
		if err != nil {
			return native(err)
		}
		if err := each(event); err != nil {
			return err
		}
	}
}
