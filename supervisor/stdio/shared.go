package stdio

import (
	"sync"

	"github.com/minicri/minicri/supervisor/stdio/crilog"
	"github.com/minicri/minicri/supervisor/stdio/journal"
)

// Shared is what all streams of a supervisor share.
type Shared struct {
	Journal *journal.Journal
	entries crilog.Buffers
	chunks  sync.Pool // of *[pumpBuffer]byte: a stream that is silent holds none
}

// chunk is the memory of a pump for one move.
type chunk struct {
	of     *Shared
	buffer *[pumpBuffer]byte
}

func (c *chunk) take(int) []byte {
	if c.buffer, _ = c.of.chunks.Get().(*[pumpBuffer]byte); c.buffer == nil {
		c.buffer = new([pumpBuffer]byte)
	}
	return c.buffer[:]
}

func (*chunk) have(int) {}

func (c *chunk) moved() {
	c.of.chunks.Put(c.buffer)
	c.buffer = nil
}
