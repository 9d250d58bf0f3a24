package runtime

import (
	"context"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"strconv"
	"sync"
	"sync/atomic"

	"github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"
)

// execNumbers are the ids of a container's execs, which no predecessor has given.
type execNumbers struct{ last atomic.Uint64 }

func (n *execNumbers) next() string {
	return "exec-" + strconv.Itoa(os.Getpid()) + "-" + strconv.FormatUint(n.last.Add(1), 10)
}

// eventSink is what shims publish their events to. A shim does not start without
// one. The exits of processes are asked for, and lack of memory is seen in
// cgroups, so what is published is only taken.
type eventSink struct {
	root string

	mu     sync.Mutex
	served bool
}

func newEventSink(root string) *eventSink { return &eventSink{root: root} }

// address is an abstract socket: a path below root may be too long for one.
func (s *eventSink) address() string {
	hash := fnv.New64a()
	_, _ = hash.Write([]byte(s.root))
	return fmt.Sprintf("@minicri-events-%016x", hash.Sum64())
}

// serve listens, once, until this process ends.
func (s *eventSink) serve() error {
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.served {
		return nil
	}
	listener, err := net.Listen("unix", s.address())
	if err != nil {
		return fmt.Errorf("listen for the events of shims: %w", err)
	}
	server, err := ttrpc.NewServer(ttrpc.WithServerHandshaker(ttrpc.UnixSocketRequireSameUser()))
	if err != nil {
		return errors.Join(err, listener.Close())
	}
	events.RegisterTTRPCEventsService(server, s)
	go func() { _ = server.Serve(context.Background(), listener) }()
	s.served = true
	return nil
}

// Forward takes an event.
func (*eventSink) Forward(context.Context, *events.ForwardRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, nil
}
