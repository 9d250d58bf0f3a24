package container

import (
	"context"
	"fmt"
	"sync"
	"sync/atomic"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/lock"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/supervisor/client"
)

// Container is one application container.
type Container struct {
	Record
	config *runtimeapi.ContainerConfig

	// facts are replaced, never changed, under factsLock, which is held while
	// they are written too. removed is set when they must not be written any more,
	// unwritten when their last write failed.
	facts     atomic.Pointer[Facts]
	factsLock sync.Mutex
	removed   bool
	unwritten bool
	// output is held, under factsLock, as long as it may not be in the log.
	output *client.Output
	// abandon ends the container's creation; nil if this daemon has not made it.
	abandon context.CancelCauseFunc
	// listed is set once clients may see the container.
	listed atomic.Bool
	// ended is closed when the container has ended.
	ended chan struct{}
	// lock is held by every operation that makes, starts, updates or destroys the
	// container.
	lock lock.Mutex
	// listSize is what it takes in the list of all, without texts, in bytes.
	listSize int

	// reaped is how its first process has ended, if it ended as our child; nil before.
	reaped atomic.Pointer[reaped]

	// watched is set while the daemon waits for its end, because its supervisor does
	// not know it.
	watched atomic.Bool
	// unserved is set when no supervisor served as the container was to be deleted
	// from it. Only under the lock.
	unserved bool

	// announced is set once plugins know of the container, those that come later too;
	// stopAnnounced once they were notified of its end, under stopLock, which is held
	// while they are, and during a start.
	announced     atomic.Bool
	stopAnnounced bool
	stopLock      lock.Mutex

	timeline *step.Timeline
	// failure is why the container could not be made, nil if it was.
	failure atomic.Pointer[error]
}

func newContainer(record Record, config *runtimeapi.ContainerConfig) *Container {
	c := &Container{Record: record, config: config, ended: make(chan struct{}), lock: lock.New(), stopLock: lock.New(), timeline: step.NewTimeline(nil), listSize: listSize(record, config)}
	c.facts.Store(&Facts{})
	return c
}

// group is that of the container's supervisor.
func (c *Container) group() string { return c.Supervisor }

// acquire takes the container's lock, or gives up with the context.
func (c *Container) acquire(ctx context.Context) (unlock func(), err error) {
	if err := c.lock.Lock(ctx); err != nil {
		return nil, fmt.Errorf("wait for another operation on container %s: %w", c.ID, err)
	}
	return c.lock.Unlock, nil
}

// forgetEnvironment drops what is on disk and was needed to make the container
// only, of which there may be megabytes. The container is not visible yet.
func (c *Container) forgetEnvironment() {
	c.Record.Config = nil
	c.config = proto.CloneOf(c.config)
	c.config.Envs = nil
}

// Config is what the container was made from, without the environment. It must
// not be changed.
func (c *Container) Config() *runtimeapi.ContainerConfig { return c.config }

// Facts are what is known of the container now. They must not be changed.
func (c *Container) Facts() *Facts { return c.facts.Load() }

// State is the CRI's state, now.
func (c *Container) State() runtimeapi.ContainerState { return c.Facts().State() }

// update replaces the facts; factsLock is held.
func (c *Container) update(change func(*Facts)) *Facts {
	next := *c.facts.Load()
	change(&next)
	c.facts.Store(&next)
	return &next
}

// holdOutput keeps what the container writes while its supervisor may die, and no
// longer; factsLock is held.
func (c *Container) holdOutput(dir string) {
	switch f := c.Facts(); {
	case f.FinishedAt != 0 || c.removed:
		c.output.Close()
		c.output = nil
	case c.output == nil && f.inShim():
		c.output = client.HoldOutput(dir, c.ID)
	}
}

// wakeWaiters wakes the callers that wait for the end of the container, if it has ended;
// factsLock is held. It is called last: what they do next comes after the events.
func (c *Container) wakeWaiters() {
	if c.Facts().FinishedAt == 0 {
		return
	}
	select {
	case <-c.ended:
	default:
		close(c.ended)
	}
}
