// Package step runs the named steps of a pod's and of a container's life. The
// name of a step is the prefix of its errors, its failpoints, and what it is
// measured by. The package keeps no state.
package step

import (
	"context"
	"fmt"
	"time"

	"github.com/minicri/minicri/internal/step/failpoint"
)

// Observer is told of each step that has ended; nil if nobody asks.
type Observer func(step string, took time.Duration, err error)

// Run runs one step, unless the context has ended before it.
func (o Observer) Run(ctx context.Context, name string, do func() error) error {
	began := time.Now()
	err := context.Cause(ctx)
	if err == nil {
		err = failpoint.Hit(name + " before")
	}
	if err == nil {
		err = do()
	}
	if err == nil {
		err = failpoint.Hit(name + " after")
	}
	if o != nil {
		o(name, time.Since(began), err)
	}
	if err != nil {
		return fmt.Errorf("%s: %w", name, err)
	}
	return nil
}
