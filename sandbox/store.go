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

// Options say how sandboxes are made.
type Options struct {
	Root, State string     // the durable directory, and the volatile one
	Version     string     // of the program, for records
	Node        *node.Node // its mark begins the names of all cgroups and namespace files
	// Supervisors run pauses and containers; new sandboxes get Group.
	Supervisors *client.Set
	Group       string
	Handlers    *handler.Set
	// SystemdCgroup chooses the cgroup driver; pods that name no parent get CgroupParent.
	SystemdCgroup bool
	CgroupParent  string
	Machine       machine.Machine
	// Defaults are the node's; ShmSize is that of /dev/shm in bytes.
	Defaults      oci.Defaults
	ShmSize       int64
	Hierarchies   cgroup.Hierarchies
	Networks      *network.CNI
	Netns, Userns *namespace.Dir
	Limits        Limits
	// Observe, if set, measures each step that has ended.
	Observe step.Observer
	// Lives, if set, keeps the timelines of what is gone or could not be made.
	Lives   *step.Lives
	Events  Events  // nil for none
	Plugins Plugins // nil if there never are any
	Logger  *slog.Logger
}

// Events receives a sandbox's events, under its lock. It must not block.
type Events interface {
	SandboxEvent(sb *Sandbox, kind runtimeapi.ContainerEventType)
}

// Limits bound the waits of pods and containers.
type Limits struct {
	// Run bounds a whole run, Destroy the destruction of a sandbox, Create any operation on a container.
	Run, Destroy, Create time.Duration
	// Kill is how long a process may take to end after SIGKILL.
	Kill time.Duration
}

// Containers are what runs in sandboxes, and is removed before them.
type Containers interface {
	// StopPod ends all containers of a sandbox; RemovePod removes them and what they shared.
	StopPod(ctx context.Context, sandboxID string) error
	RemovePod(ctx context.Context, sandboxID string) error
}

// Store holds all pod sandboxes of the node.
type Store struct {
	*object.Store[*Sandbox]
	options    Options
	limits     atomic.Pointer[Limits]
	bootID     string
	rebooted   bool // since the last daemon ran
	unrecorded bool // the end of a sandbox by that is not on disk
	files      *state.Objects[Record, Facts]
	containers Containers    // nil before SetContainers
	rolledBack chan struct{} // closed by rollBack
	// unproven says why there was no pause yet, nil if there was; proof is closed after a first attempt.
	unproven atomic.Pointer[error]
	proof    chan struct{}
	logDirs  singleflight.Group // the log directories that are being made
}

// SetLimits replaces the limits for what begins from now on.
func (s *Store) SetLimits(limits Limits) { s.limits.Store(&limits) }

// Limits returns those in force.
func (s *Store) Limits() *Limits { return s.limits.Load() }

// OlderSupervisors returns those of other builds, which serve until their last pod has ended.
func (s *Store) OlderSupervisors() ([]client.Supervisor, error) {
	pods := make(map[string]int)
	for _, sb := range s.All(func(*Sandbox) bool { return true }) {
		pods[sb.Supervisor]++
	}
	return s.options.Supervisors.Older(pods)
}

// Building returns the sandboxes that Run makes, or that are destroyed after it failed.
func (s *Store) Building() []*Sandbox { return s.All(func(sb *Sandbox) bool { return !sb.Listed() }) }

// Quarantined returns the files of unreadable records and facts.
func (s *Store) Quarantined() []string { return s.files.Quarantined() }

// LeftAlone reports whether the sandbox is not to be touched, as its record cannot be read.
func (s *Store) LeftAlone(id string) bool { return s.files.LeftAlone(id) }

// Explains reports whether the id is that of a sandbox, listed or not, or of an unreadable record.
func (s *Store) Explains(id string) bool { return s.LeftAlone(id) || s.Exists(id) }

// Owners tells package sweep the pods of this node; the caller adds the containers.
func (s *Store) Owners() sweep.Owners {
	return sweep.Owners{Pod: s.Explains, Attached: s.options.Networks.Attached}
}

// Close cancels work, waits for the undo, and closes the pidfds of the pauses, which live on.
func (s *Store) Close() { s.Store.Close(s.Limits().Destroy, s.options.Logger) }

// SetContainers sets the containers in the sandboxes. Call it once, before Stop and Remove.
func (s *Store) SetContainers(containers Containers) { s.containers = containers }

func (s *Store) emit(sb *Sandbox, kind runtimeapi.ContainerEventType) {
	if s.options.Events != nil && sb.Listed() {
		s.options.Events.SandboxEvent(sb, kind)
	}
}

// Dir is the volatile directory of a sandbox.
func (s *Store) Dir(id string) string { return filepath.Join(s.options.State, "sandboxes", id) }

// Details are what a person wants to know of a sandbox beyond its facts.
type Details struct {
	NetnsPath   string
	NetnsClosed bool
	RuntimeSpec []byte // the config.json of pause; "null" if it is gone
}

// Details reads the kernel and the files.
func (s *Store) Details(sb *Sandbox) Details {
	details := Details{NetnsPath: s.NetnsPath(sb), RuntimeSpec: []byte("null")}
	details.NetnsClosed = details.NetnsPath != "" && !s.options.Netns.Alive(sb.ID)
	if spec, err := os.ReadFile(s.specFile(sb.ID)); err == nil {
		details.RuntimeSpec = spec
	}
	return details
}

// LiveAddresses returns the addresses of the sandbox unless its network namespace was removed by hand.
func (s *Store) LiveAddresses(sb *Sandbox) []netip.Addr {
	if !s.options.Netns.Alive(sb.ID) {
		return nil
	}
	return sb.Addresses()
}

// NetnsPath is where the sandbox's network namespace is pinned, "" for the node's.
func (s *Store) NetnsPath(sb *Sandbox) string {
	if sb.hostNetwork() {
		return ""
	}
	return s.options.Netns.Path(sb.ID)
}

// UsernsPath is where the sandbox's user namespace is pinned, "" for the node's.
func (s *Store) UsernsPath(sb *Sandbox) string {
	if oci.UserNamespace(sb.config) == nil {
		return ""
	}
	return s.options.Userns.Path(sb.ID)
}

// specFile is the runtime-spec of a sandbox's pause.
func (s *Store) specFile(id string) string { return filepath.Join(s.Dir(id), "config.json") }

// SELinux returns the labels of pause, whose level the containers share; none without SELinux.
func (s *Store) SELinux(sb *Sandbox) oci.SELinux { return s.labels(sb.ID) }

// labels reads them from the spec of pause: none if it was never prepared, or its files are gone.
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
