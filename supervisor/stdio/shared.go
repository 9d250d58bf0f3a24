package stdio

import (
	"github.com/minicri/minicri/supervisor/stdio/crilog"
	"github.com/minicri/minicri/supervisor/stdio/journal"
)

// Shared is what all streams of a supervisor share.
type Shared struct {
	Journal *journal.Journal
	entries crilog.Buffers
}

// chunk is the memory of a pump for one move: a stream that is silent holds none.
type chunk struct{}

func (chunk) take(pending int) []byte { return make([]byte, min(max(pending, 1), pumpBuffer)) }
func (chunk) have(int)                {}
func (chunk) moved()                  {}
