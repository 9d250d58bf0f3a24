package runtime

import (
	"bytes"
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"hash/fnv"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/containerd/api/services/ttrpc/events/v1"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"
	"google.golang.org/protobuf/types/known/emptypb"
)

// taskNamespace is containerd's notion of who the containers belong to.
const taskNamespace = "minicri"

// shimLimit bounds a run of a shim's verb.
const shimLimit = 60 * time.Second

// verb runs the shim's program, as containerd does.
func (r *Task) verb(id, bundle, verb string) ([]byte, error) {
	ctx, cancel := context.WithTimeout(context.Background(), shimLimit)
	defer cancel()
	arguments := append(append([]string(nil), r.program[1:]...),
		"-namespace", taskNamespace, "-id", id, "-bundle", bundle, "-address", r.events.address(), "-publish-binary", "/bin/true", verb)
	command := exec.CommandContext(ctx, r.program[0], arguments...)
	command.Dir = bundle
	// Shims look for their runtimes in PATH; version 2 of the task API is what is
	// spoken here.
	command.Env = []string{
		"PATH=" + os.Getenv("PATH"), "TTRPC_ADDRESS=" + r.events.address(), "NAMESPACE=" + taskNamespace,
		"MAX_SHIM_VERSION=2", "CONTAINERD_SHIM_MONITOR=1", "GOMAXPROCS=2",
	}
	var said, complained bytes.Buffer
	command.Stdout, command.Stderr = &said, &complained
	command.WaitDelay = time.Second // a shim that stays may hold the pipes
	if err := command.Run(); err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		return nil, fmt.Errorf("%s %s: %s", filepath.Base(r.program[0]), verb, cmp.Or(lastLine(complained.String()+said.String()), err.Error()))
	}
	return said.Bytes(), nil
}

func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	return lines[len(lines)-1]
}

// start starts the shim of a container, or finds that of its pod, and returns
// its address: alone on a line, or in the JSON of later versions
// (BootstrapParams).
func (r *Task) start(id, bundle string) (address string, err error) {
	said, err := r.verb(id, bundle, "start")
	if err != nil {
		return "", err
	}
	var bootstrap struct {
		Version           int
		Address, Protocol string
	}
	address = strings.TrimSpace(string(said))
	if json.Unmarshal(said, &bootstrap) == nil {
		if bootstrap.Version > 2 || bootstrap.Protocol != "" && bootstrap.Protocol != "ttrpc" {
			return "", fmt.Errorf("%s speaks version %d of the task API over %s, not version 2 over ttrpc: %w",
				r.program[0], bootstrap.Version, bootstrap.Protocol, errdefs.ErrNotImplemented)
		}
		address = bootstrap.Address
	}
	if !strings.HasPrefix(address, "unix://") {
		return "", fmt.Errorf("%s start: %.200q is not the address of a unix socket", r.program[0], said)
	}
	return address, nil
}

// remove has the program remove what a shim that is gone has left.
func (r *Task) remove(id, bundle string) error {
	_, err := r.verb(id, bundle, "delete")
	return err
}

// inNamespace says in each call whose containers are meant.
func inNamespace(ctx context.Context, request *ttrpc.Request, response *ttrpc.Response, _ *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
	request.Metadata = append(request.Metadata, &ttrpc.KeyValue{Key: "containerd-namespace-ttrpc", Value: taskNamespace})
	return invoke(ctx, request, response)
}

// runcShim is the shim whose options are known.
const runcShim = "containerd-shim-runc-v2"

// options are those of a new container, nil for the shim's own.
func (r *Task) options() (*anypb.Any, error) {
	if filepath.Base(r.program[0]) != runcShim {
		return nil, nil
	}
	// Its states are with ours.
	encoded, err := proto.Marshal(&options.Options{Root: filepath.Join(filepath.Dir(r.bundles), "runc"), SystemdCgroup: r.systemdCgroup})
	return &anypb.Any{TypeUrl: "containerd.runc.v1.Options", Value: encoded}, err
}

func (c *taskContainer) connect() error {
	connection, err := net.Dial("unix", strings.TrimPrefix(c.known.Address, "unix://"))
	if err != nil {
		return fmt.Errorf("connect to the shim: %w", err)
	}
	client := ttrpc.NewClient(connection, ttrpc.WithUnaryClientInterceptor(inNamespace))
	c.task, c.close = task.NewTTRPCTaskClient(client), client.Close
	return nil
}

// pathOf is where a shim, another process, finds a file of ours; "" for none.
func pathOf(file *os.File) string {
	if file == nil {
		return ""
	}
	return fmt.Sprintf("/proc/%d/fd/%d", os.Getpid(), file.Fd())
}

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
