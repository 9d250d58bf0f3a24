package sandbox

import (
	"context"
	"encoding/json"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/singleflight"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/supervisor/client"
)

// Options say what sandboxes are made with.
type Options struct {
	// Root is the durable directory, State the volatile one.
	Root, State string
	// Version is the program's, for records.
	Version string
	// Node is whose sandboxes they are: the name of every cgroup and namespace
	// file made here begins with its mark.
	Node *node.Node
	// Supervisors run pauses and containers; Group is the one of new sandboxes.
	Supervisors *client.Set
	Group       string
	Handlers    *handler.Set
	// SystemdCgroup chooses the cgroup driver; CgroupParent is for pods that
	// name none.
	SystemdCgroup bool
	CgroupParent  string
	Machine       machine.Machine
	// Defaults are the node's for pods and containers; ShmSize is that of /dev/shm in bytes.
	Defaults      oci.Defaults
	ShmSize       int64
	Hierarchies   cgroup.Hierarchies
	Networks      *network.CNI
	Netns, Userns *namespace.Dir
	Limits        Limits
	// Observe measures each step that has ended; nil if nothing does.
	Observe step.Observer
	// Lives keeps the timelines of what is gone or could not be made; nil if nothing does.
	Lives *step.Lives
	// Events receives what happens to sandboxes; nil if nothing does.
	Events Events
	// Plugins take part in the lives of pods; nil if there never are any.
	Plugins Plugins
	Logger  *slog.Logger
}

// Events receives what has happened to a sandbox, under the sandbox's lock. It
// must not block.
type Events interface {
	SandboxEvent(sb *Sandbox, kind runtimeapi.ContainerEventType)
}

// Limits bound what pods and containers may wait for.
type Limits struct {
	// Run is the longest that all steps of a run may take, Destroy the longest for
	// destroying a sandbox, Create for making, starting or destroying a container.
	Run, Destroy, Create time.Duration
	// Kill is how long a process may take to end after SIGKILL.
	Kill time.Duration
}

// Containers are what runs in sandboxes, and is removed before them.
type Containers interface {
	// StopPod ends all containers of a sandbox, RemovePod removes them, and
	// what they shared.
	StopPod(ctx context.Context, sandboxID string) error
	RemovePod(ctx context.Context, sandboxID string) error
}

// Store are all pod sandboxes of this node.
type Store struct {
	*object.Store[*Sandbox]
	options Options
	limits  atomic.Pointer[Limits]
	bootID  string
	// rebooted: the machine has booted since the last daemon ran.
	rebooted bool
	files    *state.Objects[Record, Facts]
	// containers are what runs in the sandboxes; nil before SetContainers.
	containers Containers
	// rolledBack is closed by rollBack.
	rolledBack chan struct{}
	// unproven is why no pause could be made until now, nil if one could; proof is
	// closed when the first has been tried.
	unproven atomic.Pointer[error]
	proof    chan struct{}
	// logDirs are the log directories that are being made.
	logDirs singleflight.Group
}

// SetLimits puts other limits into force, for what begins from now on.
func (s *Store) SetLimits(limits Limits) { s.limits.Store(&limits) }

// Limits are those in force.
func (s *Store) Limits() *Limits { return s.limits.Load() }

// OlderSupervisors are those of other builds than this, which serve until their last pod
// has ended.
func (s *Store) OlderSupervisors() ([]client.Supervisor, error) {
	pods := make(map[string]int)
	for _, sb := range s.All(func(*Sandbox) bool { return true }) {
		pods[sb.Supervisor]++
	}
	return s.options.Supervisors.Older(pods)
}

// Building returns the sandboxes that Run is working on, or that are being
// destroyed after it failed.
func (s *Store) Building() []*Sandbox { return s.All(func(sb *Sandbox) bool { return !sb.Listed() }) }

// Quarantined are the files of records and facts that cannot be read.
func (s *Store) Quarantined() []string { return s.files.Quarantined() }

// LeftAlone reports whether the id is that of a sandbox whose record cannot be
// read: nothing of it is touched.
func (s *Store) LeftAlone(id string) bool { return s.files.LeftAlone(id) }

// Explains reports whether what carries the id is to be there: it has a sandbox,
// listed or not, or a record that cannot be read.
func (s *Store) Explains(id string) bool { return s.LeftAlone(id) || s.Exists(id) }

// Owners are the pods of this node to package sweep, which is to ask the
// containers, too.
func (s *Store) Owners() sweep.Owners {
	return sweep.Owners{Pod: s.Explains, Attached: s.options.Networks.Attached}
}

// Close cancels what is under way, waits until it has been destroyed, and closes
// the pidfds of the pause processes, which live on.
func (s *Store) Close() { s.Store.Close(s.Limits().Destroy, s.options.Logger) }

// SetContainers sets the containers that run in the sandboxes. Call it once,
// before Stop and Remove.
func (s *Store) SetContainers(containers Containers) { s.containers = containers }

// emit publishes an event of a listed sandbox.
func (s *Store) emit(sb *Sandbox, kind runtimeapi.ContainerEventType) {
	if s.options.Events != nil && sb.Listed() {
		s.options.Events.SandboxEvent(sb, kind)
	}
}

// Dir is the volatile directory of a sandbox.
func (s *Store) Dir(id string) string { return filepath.Join(s.options.State, "sandboxes", id) }

// Details are what a person wants to know of a sandbox, beyond its facts.
type Details struct {
	NetnsPath   string
	NetnsClosed bool
	// RuntimeSpec is the config.json of pause, "null" when it is gone.
	RuntimeSpec []byte
}

// Details looks at the kernel and the files, now.
func (s *Store) Details(sb *Sandbox) Details {
	details := Details{NetnsPath: s.NetnsPath(sb), RuntimeSpec: []byte("null")}
	details.NetnsClosed = details.NetnsPath != "" && !s.options.Netns.Alive(sb.ID)
	if spec, err := os.ReadFile(s.specFile(sb.ID)); err == nil {
		details.RuntimeSpec = spec
	}
	return details
}

// LiveAddresses are the addresses of the sandbox if the namespace that they
// are in is still there: one may have been removed by hand.
func (s *Store) LiveAddresses(sb *Sandbox) []netip.Addr {
	addresses := sb.Addresses()
	if len(addresses) == 0 || !s.options.Netns.Alive(sb.ID) {
		return nil
	}
	return addresses
}

// NetnsPath is where the sandbox's network namespace is pinned, "" for that of
// the node.
func (s *Store) NetnsPath(sb *Sandbox) string {
	if sb.hostNetwork() {
		return ""
	}
	return s.options.Netns.Path(sb.ID)
}

// UsernsPath is where the sandbox's user namespace is pinned, "" for that of
// the node.
func (s *Store) UsernsPath(sb *Sandbox) string {
	if oci.UserNamespace(sb.config) == nil {
		return ""
	}
	return s.options.Userns.Path(sb.ID)
}

// specFile is the runtime-spec of a sandbox's pause.
func (s *Store) specFile(id string) string { return filepath.Join(s.Dir(id), "config.json") }

// SELinux are the labels of the sandbox's pause process, which its containers
// share the level of; none on a machine without SELinux.
func (s *Store) SELinux(sb *Sandbox) oci.SELinux { return s.labels(sb.ID) }

// labels are read from the spec that pause was started with: none if it was never
// prepared, or its files are gone.
func (s *Store) labels(id string) oci.SELinux {
	if !s.options.Machine.SELinux {
		return oci.SELinux{}
	}
	spec := &specs.Spec{}
	data, err := os.ReadFile(s.specFile(id))
	if err != nil || json.Unmarshal(data, spec) != nil || spec.Process == nil || spec.Linux == nil {
		return oci.SELinux{}
	}
	return oci.SELinux{Process: spec.Process.SelinuxLabel, Mount: spec.Linux.MountLabel}
}
