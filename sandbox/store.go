package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"log/slog"
	"net/netip"
	"os"
	"path/filepath"
	"sync/atomic"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	"golang.org/x/sync/singleflight"
	"google.golang.org/protobuf/encoding/protojson"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/supervisor/client"
)

// Options say how sandboxes are made.
type Options struct {
	Root, State string     // the durable directory, and the volatile one
	Version     string     // of the program, for records
	Node        *node.Node // its mark begins the names of all cgroups and namespace files
	Supervisors Supervisors
	Handlers    *handler.Set
	Kernel      Kernel
	// SystemdCgroup chooses the cgroup driver; pods that name no parent get CgroupParent.
	SystemdCgroup bool
	CgroupParent  string
	Machine       machine.Machine
	// Defaults are the node's; ShmSize is that of /dev/shm in bytes.
	Defaults      oci.Defaults
	ShmSize       int64
	Hierarchies   Cgroups
	Networks      Networks
	Netns, Userns Namespaces
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

// Containers ends and removes what runs in a sandbox, which comes before the sandbox's own end.
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
	unrecorded bool // the end of a sandbox by that reboot is not on disk
	files      *state.Objects[Record, Facts]
	containers Containers    // set before the first Stop
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

// SELinux returns the labels of pause, whose level the containers share, from its spec: none without SELinux, if
// pause was never prepared, or its files are gone.
func (s *Store) SELinux(id string) oci.SELinux {
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

// Plugins take part in the lives of pods (package nri). Each call ends, by limits of its own or with
// its context. An error of RunPod or UpdatePod refuses the operation; other errors are only logged.
type Plugins interface {
	// Enabled reports whether there may be plugins. If not, nothing else is called; later ones get all pods.
	Enabled() bool
	// RunPod is called when the pod has its network, before it is Ready.
	RunPod(ctx context.Context, sb *Sandbox) error
	// UpdatePod is called before the resources of a pod are recorded, UpdatedPod afterwards.
	UpdatePod(ctx context.Context, sb *Sandbox, overhead, resources *runtimeapi.LinuxContainerResources) error
	UpdatedPod(ctx context.Context, sb *Sandbox) error
	// StopPod is called after the end of the containers, RemovePod when only files are left.
	StopPod(ctx context.Context, sb *Sandbox) error
	RemovePod(ctx context.Context, sb *Sandbox) error
}

func (s *Store) hasPlugins() bool { return s.options.Plugins != nil && s.options.Plugins.Enabled() }

// notify tells the plugins what was done to a pod; an error is only logged.
func (s *Store) notify(steps *step.Sequence, sb *Sandbox, name step.Name, call func(Plugins, context.Context, *Sandbox) error) {
	if !s.hasPlugins() {
		return
	}
	err := steps.Do(name, func(ctx context.Context) error { return call(s.options.Plugins, ctx, sb) })
	if err != nil {
		s.log(sb).Warn("an NRI plugin was not notified of what was done to a pod", "err", err)
	}
}

// Resources are a pod's, in protobuf's JSON. The kubelet sets them on the pod's cgroup; we record them.
type Resources struct {
	Overhead  json.RawMessage `json:"overhead,omitempty"`
	Resources json.RawMessage `json:"resources,omitempty"`
}

// UpdateResources records what the kubelet set on the pod's cgroup; nil changes nothing.
func (s *Store) UpdateResources(ctx context.Context, id string, overhead, resources *runtimeapi.LinuxContainerResources) error {
	sb, err := s.Find(id)
	if err != nil {
		return err
	}
	machine := s.options.Machine
	err = errors.Join(validate.Resources("overhead.", overhead, machine), validate.Resources("resources.", resources, machine))
	if err != nil {
		return err
	}
	// Without the sandbox's lock, a plugin that hangs does not delay the pod's end.
	steps := s.begin(ctx, sb)
	if s.hasPlugins() {
		steps.Step(stepNRIUpdate, func(ctx context.Context) error { return s.options.Plugins.UpdatePod(ctx, sb, overhead, resources) })
	}
	if err = steps.Err(); err == nil {
		err = s.recordResources(ctx, sb, overhead, resources)
	}
	if err != nil {
		return fmt.Errorf("update the resources of sandbox %s: %w", sb.ID, err)
	}
	s.notify(s.begin(ctx, sb), sb, stepNRIUpdated, Plugins.UpdatedPod)
	return nil
}

func (s *Store) recordResources(ctx context.Context, sb *Sandbox, overhead, resources *runtimeapi.LinuxContainerResources) error {
	unlock, err := sb.Acquire(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if _, err := s.Find(sb.ID); err != nil { // a Remove was faster
		return err
	}
	next, err := sb.Resources()
	if err == nil {
		err = errors.Join(encode(&next.Overhead, overhead), encode(&next.Resources, resources))
	}
	if err != nil {
		return err
	}
	sb.Update(func(f *Facts) { f.Updated = next })
	return s.writeFacts(sb)
}

// Resources returns those of the last update, or those that the pod was made with.
func (sb *Sandbox) Resources() (*Resources, error) {
	if updated := sb.Facts().Updated; updated != nil {
		return new(*updated), nil
	}
	made, linux := &Resources{}, sb.config.GetLinux()
	return made, errors.Join(encode(&made.Overhead, linux.GetOverhead()), encode(&made.Resources, linux.GetResources()))
}

// encode keeps what is there if nothing is given.
func encode(to *json.RawMessage, given *runtimeapi.LinuxContainerResources) (err error) {
	if given != nil {
		*to, err = protojson.Marshal(given)
	}
	return err
}
