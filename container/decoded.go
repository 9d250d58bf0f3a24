package container

import (
	"encoding/json"
	"sync/atomic"

	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
)

// decoded keeps the message that JSON of the facts stands for: a status is asked
// for far more often than the facts change, and to decode it takes longer than all
// the rest of one.
type decoded[T any, M interface {
	*T
	proto.Message
}] struct {
	last atomic.Pointer[decoding[T]]
}

type decoding[T any] struct {
	from    json.RawMessage
	message *T // nil: it cannot be decoded
}

// of returns the message of what the facts hold, which must not be changed; nil if
// that is none. Facts are replaced and never changed, so the same bytes in memory,
// which last keeps there, are the same message.
func (d *decoded[T, M]) of(encoded json.RawMessage) *T {
	if len(encoded) == 0 {
		return nil
	}
	if last := d.last.Load(); last != nil && len(last.from) == len(encoded) && &last.from[0] == &encoded[0] {
		return last.message
	}
	next := &decoding[T]{from: encoded, message: new(T)}
	if err := protojson.Unmarshal(encoded, M(next.message)); err != nil {
		next.message = nil
	}
	d.last.Store(next)
	return next.message
}
