package sandbox

import (
	"context"
	"errors"
	"time"
)

// StepTime is one row of a timeline: a step, when it began, how long it took.
type StepTime struct {
	Step  string        `json:"step"`
	Began time.Time     `json:"began"`
	Took  time.Duration `json:"took,omitempty"`
}

// creation is one way through the steps of Run. After the first error the
// steps that follow do nothing, so that Run reads as a table of contents.
type creation struct {
	*Sandbox
	owner *Store
	// ctx is the daemon's, not the request's: work goes on when the caller
	// has lost patience, and is handed to the retry.
	ctx      context.Context
	err      error
	timeline []StepTime
	starter  *pauseStarter
	holder   holder
}

// step runs one step, unless an earlier one failed.
func (c *creation) step(name string, do func() error) {
	if c.err != nil {
		return
	}
	row := StepTime{Step: name, Began: time.Now()}
	c.stage.Store(&row)
	err := c.owner.around(c.ctx, name, do)
	row.Took = time.Since(row.Began)
	c.stage.Store(nil)
	c.timeline = append(c.timeline, row)
	c.err = err
}

// underWay is the row of the step that calls it, as far as it has come.
func (c *creation) underWay() StepTime {
	row := *c.stage.Load()
	row.Took = time.Since(row.Began)
	return row
}

// beside starts a step that runs along with those after it. The function that
// it returns waits for it and gives its error, as often as it is called.
func (c *creation) beside(name string, do func() error) (wait func() error) {
	if c.err != nil {
		return func() error { return nil }
	}
	row := StepTime{Step: name, Began: time.Now()}
	var err error
	done := make(chan struct{})
	go func() {
		defer close(done)
		err = c.owner.around(c.ctx, name, do)
		row.Took = time.Since(row.Began)
	}()
	waited := false
	return func() error {
		<-done
		if !waited {
			c.timeline = append(c.timeline, row)
			waited = true
		}
		return err
	}
}

// join waits for a step that runs beside, even when another one has failed:
// what is undone must have ended.
func (c *creation) join(wait func() error) { c.err = errors.Join(c.err, wait()) }

// around runs do as the step of that name.
func (s *Store) around(ctx context.Context, name string, do func() error) error {
	return s.options.Observe.Run(ctx, name, do)
}
