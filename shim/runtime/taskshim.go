package runtime

import (
	"cmp"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"time"

	"github.com/containerd/containerd/api/runtime/task/v2"
	"github.com/containerd/containerd/api/types/runc/options"
	"github.com/containerd/errdefs"
	"github.com/containerd/ttrpc"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/types/known/anypb"

	"github.com/minicri/minicri/internal/process"
)

// taskNamespace is the containers' namespace in the sense of containerd.
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
		"MAX_SHIM_VERSION=3", "CONTAINERD_SHIM_MONITOR=1", "GOMAXPROCS=2",
	}
	var said, complained process.Said
	command.Stdout, command.Stderr = &said, &complained
	command.Cancel = func() error { return endRun(command.Process) }
	command.WaitDelay = time.Second // a shim that stays may hold the pipes
	err := command.Run()
	if ctx.Err() != nil {
		return nil, fmt.Errorf("%s %s of container %s: not done within %v, and killed: %w", r.program[0], verb, id, shimLimit, ctx.Err())
	}
	if err != nil && !errors.Is(err, exec.ErrWaitDelay) {
		return nil, fmt.Errorf("%s %s: %s", filepath.Base(r.program[0]), verb, cmp.Or(lastLine(complained.String()+said.String()), err.Error()))
	}
	return said.Bytes(), nil
}

// lastLine is the last line of a text, or the end of one that is long.
func lastLine(text string) string {
	lines := strings.Split(strings.TrimSpace(text), "\n")
	last := lines[len(lines)-1]
	return strings.ToValidUTF8(last[max(0, len(last)-longestLine):], "?")
}

const longestLine = 500

// start starts the shim of a container, or finds that of its pod, and returns
// where and how it is spoken to.
func (r *Task) start(id, bundle string) (taskAddress, error) {
	said, err := r.verb(id, bundle, "start")
	if err != nil {
		return taskAddress{}, err
	}
	return parseAddress(r.program[0], said)
}

// taskAddress is where a shim serves, and by which version of the task API.
type taskAddress struct {
	Address string `json:"address"` // unix://PATH
	Version int    `json:"version,omitempty"`
}

// parseAddress reads what a shim says at its start: an address alone on a line,
// or in the JSON of later versions (BootstrapParams).
func parseAddress(program string, said []byte) (taskAddress, error) {
	bootstrap := struct {
		taskAddress
		Protocol string
	}{Protocol: "ttrpc"}
	if json.Unmarshal(said, &bootstrap) != nil {
		bootstrap.taskAddress = taskAddress{Address: strings.TrimSpace(string(said)), Version: 2}
	}
	a := bootstrap.taskAddress
	path, unixSocket := strings.CutPrefix(a.Address, "unix://")
	switch {
	case a.Version != 2 && a.Version != 3 || bootstrap.Protocol != "ttrpc":
		return a, fmt.Errorf("%s speaks version %d of the task API over %.20q, not 2 or 3 over ttrpc: %w", program, a.Version, bootstrap.Protocol, errdefs.ErrNotImplemented)
	case !unixSocket || path == "":
		return a, fmt.Errorf("%s start: %.200q is not the address of a unix socket", program, said)
	case len(path) > longestSocket:
		return a, fmt.Errorf("%s start: the path of its socket is %d characters long, a unix socket can have %d", program, len(path), longestSocket)
	}
	return a, nil
}

// longestSocket: sockaddr_un (unix(7)) holds 107 characters and a NUL.
const longestSocket = 107

// remove has the program remove what a shim that is gone has left.
func (r *Task) remove(id, bundle string) error {
	_, err := r.verb(id, bundle, "delete")
	return err
}

// inNamespace says in each call whose containers are meant. The messages of
// version 3 of the task API are those of version 2, under another name.
func (a taskAddress) inNamespace(ctx context.Context, request *ttrpc.Request, response *ttrpc.Response, _ *ttrpc.UnaryClientInfo, invoke ttrpc.Invoker) error {
	request.Metadata = append(request.Metadata, &ttrpc.KeyValue{Key: "containerd-namespace-ttrpc", Value: taskNamespace})
	if a.Version == 3 {
		request.Service = "containerd.task.v3.Task"
	}
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

// connect connects to the shim.
func (c *taskContainer) connect() error {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	connection, err := (&net.Dialer{}).DialContext(ctx, "unix", strings.TrimPrefix(c.known.Address, "unix://"))
	if err != nil {
		return fmt.Errorf("connect to the shim of container %s: %w", c.id, err)
	}
	client := ttrpc.NewClient(connection, ttrpc.WithUnaryClientInterceptor(c.known.inNamespace))
	c.task, c.close = task.NewTTRPCTaskClient(client), client.Close
	return nil
}

// findShim asks the shim, which serves and has no container yet or those of its
// pod, for its pid: one that we have started.
func (c *taskContainer) findShim() error {
	ctx, cancel := context.WithTimeout(context.Background(), callLimit)
	defer cancel()
	answer, err := c.task.Connect(ctx, &task.ConnectRequest{ID: c.id})
	if err != nil {
		return nil // it has no answer before a container is made
	}
	return c.noteShim(int(answer.GetShimPid()))
}

func (c *taskContainer) noteShim(pid int) error {
	p, err := openProcess(pid)
	if err != nil {
		return fmt.Errorf("the shim of container %s: %w", c.id, err)
	}
	defer p.Close()
	is := shimProcess{PID: pid, StartTime: p.StartTime}
	known, _ := c.runtime.shimAt(c.known.Address)
	if known != is && (!descends(pid, os.Getpid()) || pid == os.Getpid()) {
		return fmt.Errorf("the shim of container %s says that it is process %d, which was not started here", c.id, pid)
	}
	c.known.Shim = is
	c.runtime.keepShim(c.known.Address, is)
	return nil
}

// leastKept is how many shims are kept before any is looked at.
const leastKept = 64

// keepShim remembers which process serves at an address. Those that have ended are
// looked for when there are twice as many as were left the last time.
func (r *Task) keepShim(address string, shim shimProcess) {
	r.mu.Lock()
	defer r.mu.Unlock()
	r.shims[address] = shim
	if len(r.shims) <= max(leastKept, r.mostKept) {
		return
	}
	maps.DeleteFunc(r.shims, func(_ string, s shimProcess) bool {
		p, err := Find(s.PID, s.StartTime)
		if err == nil {
			_ = p.Close()
		}
		return errors.Is(err, process.ErrGone)
	})
	r.mostKept = 2 * len(r.shims)
}

func (r *Task) shimAt(address string) (shim shimProcess, known bool) {
	r.mu.Lock()
	defer r.mu.Unlock()
	shim, known = r.shims[address]
	return shim, known
}

// endShim kills a shim that does not answer. The exits of its other containers, of
// the same pod, are not reported then.
func (c *taskContainer) endShim() {
	if c.known.Shim.PID <= 1 {
		return
	}
	if p, err := Find(c.known.Shim.PID, c.known.Shim.StartTime); err == nil {
		_ = p.Signal(unix.SIGKILL) // it may have ended
		_ = p.Close()
	}
}
