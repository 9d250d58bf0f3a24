package sandbox

import (
	"context"
	"fmt"
	"log/slog"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sync/singleflight"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/id"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/internal/validate"
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
	// Supervisors start pause; Group is the one of new sandboxes.
	Supervisors *client.Set
	Group       string
	// Handlers are the runtime handlers.
	Handlers *handler.Set
	// SystemdCgroup chooses the cgroup driver; CgroupParent is for pods that
	// name none.
	SystemdCgroup bool
	CgroupParent  string
	Machine       machine.Machine
	// Defaults are those of the node for pods; ShmSize is that of /dev/shm in
	// bytes.
	Defaults      oci.Defaults
	ShmSize       int64
	Hierarchies   cgroup.Hierarchies
	Networks      *network.CNI
	Netns, Userns *namespace.Dir
	Limits        Limits
	// Observe measures each step that has ended; nil if nothing does.
	Observe step.Observer
	// Lives keeps the timelines of pods that are gone, or could not be made; nil
	// if nothing does.
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

// Limits bound what a sandbox may wait for.
type Limits struct {
	// Run is the longest that all steps together may take, Destroy the
	// longest for destroying a sandbox.
	Run, Destroy time.Duration
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
	options Options
	// limits are those in force, see SetLimits.
	limits  atomic.Pointer[Limits]
	records *state.Records[Record]
	facts   *state.Records[Facts]
	bootID  string
	// rebooted: the machine has booted since the last daemon ran.
	rebooted bool
	// unrecorded: the end of a sandbox by the reboot could not be written down.
	unrecorded bool
	// files are records and facts together, and say what cannot be read.
	files *state.Objects[Record, Facts]

	// containers are what runs in the sandboxes; nil before SetContainers.
	containers Containers

	// base ends when the daemon does; work are the goroutines that it ends.
	base   context.Context
	cancel context.CancelCauseFunc
	work   sync.WaitGroup
	// rolledBack is closed by rollBack.
	rolledBack chan struct{}
	// unproven is why no pause could be made until now, nil if one could; proof is
	// closed when the first has been tried.
	unproven atomic.Pointer[error]
	tried    sync.Once
	proof    chan struct{}
	// logDirs are the log directories that are being made.
	logDirs singleflight.Group

	// mu guards the maps and lastCreated, and is never held while anything
	// runs or is written.
	mu          sync.RWMutex
	byID        map[string]*Sandbox
	byName      map[string]*Sandbox
	lastCreated int64
}

// SetLimits puts other limits into force, for what begins from now on.
func (s *Store) SetLimits(limits Limits) { s.limits.Store(&limits) }

// Find returns the sandbox with the id, or the only one whose id starts so;
// errdefs.ErrNotFound if there is none.
func (s *Store) Find(wanted string) (*Sandbox, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return id.Find(s.byID, "pod sandbox", wanted, func(sb *Sandbox) bool { return sb.listed.Load() })
}

// List returns the listed sandboxes, the newest first.
func (s *Store) List() []*Sandbox {
	return s.all(func(sb *Sandbox) bool { return sb.listed.Load() })
}

// OlderSupervisors are those of other builds than this, which serve until their last pod
// has ended.
func (s *Store) OlderSupervisors() ([]client.Supervisor, error) {
	pods := make(map[string]int)
	for _, sb := range s.all(func(*Sandbox) bool { return true }) {
		pods[sb.Group()]++
	}
	return s.options.Supervisors.Older(pods)
}

// Building returns the sandboxes that Run is working on, or that are being
// destroyed after it failed.
func (s *Store) Building() []*Sandbox {
	return s.all(func(sb *Sandbox) bool { return !sb.listed.Load() })
}

func (s *Store) all(match func(*Sandbox) bool) []*Sandbox {
	s.mu.RLock()
	list := make([]*Sandbox, 0, len(s.byID))
	for _, sb := range s.byID {
		if match(sb) {
			list = append(list, sb)
		}
	}
	s.mu.RUnlock()
	slices.SortFunc(list, func(a, b *Sandbox) int { return newestFirst(a.Record, b.Record) })
	return list
}

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

// Exists reports whether the id has a sandbox, listed or not.
func (s *Store) Exists(id string) bool {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return s.byID[id] != nil
}

// forget drops the sandbox and its name.
func (s *Store) forget(sb *Sandbox) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byID, sb.ID)
	if name := nameOf(sb.config.GetMetadata()); s.byName[name] == sb {
		delete(s.byName, name)
	}
}

// Close cancels what is under way, waits until it has been destroyed, and closes
// the pidfds of the pause processes, which live on. Work that is stuck in the
// kernel is waited for no longer than Limits.Destroy: the next daemon destroys
// what it leaves.
func (s *Store) Close() {
	s.cancel(errShutdown)
	ended := make(chan struct{})
	go func() {
		defer close(ended)
		s.work.Wait()
	}()
	select {
	case <-ended:
	case <-time.After(s.limits.Load().Destroy):
		s.options.Logger.Error("work on pods has not ended at the shutdown", "limit", s.limits.Load().Destroy)
	}
}

// errShutdown is the cause of work that a shutdown cut short.
var errShutdown = fmt.Errorf("minicri is shutting down: %w", errdefs.ErrUnavailable)

// Dir is the volatile directory of a sandbox.
func (s *Store) Dir(id string) string { return filepath.Join(sandboxesDir(s.options.State), id) }

// sandboxesDir is below the volatile directory and has something for each sandbox.
func sandboxesDir(state string) string { return filepath.Join(state, "sandboxes") }

// SetContainers sets the containers that run in the sandboxes. Call it once,
// before Stop and Remove.
func (s *Store) SetContainers(containers Containers) { s.containers = containers }

// emit publishes an event of a listed sandbox.
func (s *Store) emit(sb *Sandbox, kind runtimeapi.ContainerEventType) {
	if s.options.Events != nil && sb.listed.Load() {
		s.options.Events.SandboxEvent(sb, kind)
	}
}

// node is what the checks of a pod have to know.
func (s *Store) node() validate.Node {
	o := s.options
	return validate.Node{Machine: o.Machine, Handlers: o.Handlers.Names(), SystemdCgroup: o.SystemdCgroup}
}
