package runtime

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"net"
	"os"
	"strconv"
	"sync"

	"github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/types/known/emptypb"

	"github.com/minicri/minicri/internal/socket"
)

// newExecID is an id for an exec that no other has: the shim may still have those of a
// predecessor, which had our pid if it was upgraded.
func newExecID() string { return "exec-" + strconv.FormatUint(rand.Uint64(), 36) }

// Events is what the shims of a supervisor publish their events to. A shim does
// not start without one. The exits of processes are asked for, and lack of memory
// is seen in cgroups, so what is published is only taken.
type Events struct {
	listener net.Listener
	once     sync.Once
}

// ListenForEvents takes a path that belongs to this process; a socket that a
// predecessor has left there is replaced. Not an abstract socket: a pod in the
// node's network could take its name. It is served when the first shim needs it.
func ListenForEvents(path string) (*Events, error) {
	if err := os.Remove(path); err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, fmt.Errorf("a socket for the events of shims: %w", err)
	}
	listener, err := socket.ListenPrivate(path)
	if err != nil {
		return nil, fmt.Errorf("the events of shims: %w", err)
	}
	return &Events{listener: listener}, nil
}

func (e *Events) address() string { return e.listener.Addr().String() }

// serve serves, once, until this process ends.
func (e *Events) serve() (err error) {
	e.once.Do(func() {
		var server *ttrpc.Server
		if server, err = ttrpc.NewServer(ttrpc.WithServerHandshaker(ttrpc.UnixSocketRequireSameUser())); err == nil {
			events.RegisterTTRPCEventsService(server, e)
			go func() { _ = server.Serve(context.Background(), e.listener) }()
		}
	})
	return err
}

// Forward takes an event.
func (*Events) Forward(context.Context, *events.ForwardRequest) (*emptypb.Empty, error) {
	return &emptypb.Empty{}, nil
}
