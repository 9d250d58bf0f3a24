package container

import (
	"cmp"
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

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/handler"
	"github.com/minicri/minicri/internal/id"
	"github.com/minicri/minicri/internal/machine"
	"github.com/minicri/minicri/internal/node"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/supervisor/client"
)

// Options say what containers are made with.
type Options struct {
	// Root is the durable directory, State the volatile one.
	Root, State string
	// Version is the program's, for records.
	Version string
	// Node is whose containers they are: the name of every cgroup made here begins
	// with its mark.
	Node *node.Node
	// Supervisors are what runs containers.
	Supervisors   *client.Set
	SystemdCgroup bool
	CgroupParent  string
	// PidsLimit is the most processes of a container, 0 for no limit.
	PidsLimit int64
	// CDIDirs are where vendors describe their devices.
	CDIDirs []string
	Machine machine.Machine
	// Defaults are those of the node for containers, and HandlerDefaults those
	// of runtime handlers that have others.
	Defaults        oci.Defaults
	HandlerDefaults map[string]oci.Defaults
	Hierarchies     cgroup.Hierarchies
	// Places are where orphans of pods and containers are looked for.
	Places    *sweep.Places
	Sandboxes *sandbox.Store
	// Handlers say which runtime runs the containers of a pod.
	Handlers *handler.Set
	Images   Images
	Limits   Limits
	// Observe measures each step that has ended; nil if nothing does.
	Observe step.Observer
	// ObserveExit counts each container that has ended, with the CRI's reason,
	// ObserveLost each supervisor that has died; nil if nothing does.
	ObserveExit func(reason string)
	ObserveLost func()
	// Lives keeps the timelines of containers that are gone, or could not be
	// made; nil if nothing does.
	Lives *step.Lives
	// Events receives what happens to containers; nil if nothing does.
	Events Events
	// Plugins take part in the lives of containers; nil if there never are any.
	Plugins Plugins
	Logger  *slog.Logger
}

// defaultsOf are those of a pod's runtime handler.
func (s *Store) defaultsOf(pod *sandbox.Sandbox) oci.Defaults {
	if own, has := (*s.handlerDefaults.Load())[pod.Handler()]; has {
		return own
	}
	return s.options.Defaults
}

// Events receives what has happened to a container, under the lock of its facts.
// It must not block.
type Events interface {
	ContainerEvent(c *Container, kind runtimeapi.ContainerEventType)
}

// Limits bound what a container may wait for.
type Limits struct {
	// Create is the longest that all steps of create, or start, may take.
	Create time.Duration
	// Kill is how long a process may take to end after SIGKILL.
	Kill time.Duration
}

// Images is what containers are made from.
type Images interface {
	Get(refOrID string) (image.Image, error)
	Prepare(ctx context.Context, key, imageID string, options image.PrepareOptions) error
	Mount(ctx context.Context, key, target, label string) error
	Unmount(target string) error
	RemoveSnapshot(ctx context.Context, key string) error
	// Snapshots are the keys of all that Prepare made.
	Snapshots(ctx context.Context) ([]string, error)
}

// Store are all containers of this node.
type Store struct {
	options Options
	// limits are those in force, see SetLimits.
	limits atomic.Pointer[Limits]
	// handlerDefaults are those in force, see SetHandlerDefaults.
	handlerDefaults atomic.Pointer[map[string]oci.Defaults]
	records         *state.Records[Record]
	facts           *state.Records[Facts]
	bootID          string
	// files are records and facts together, and say what cannot be read.
	files *state.Objects[Record, Facts]
	// hostPaths are the paths of mounts that are being looked at.
	hostPaths singleflight.Group

	// base ends when the daemon does; work are the goroutines that it ends.
	base   context.Context
	cancel context.CancelCauseFunc
	work   sync.WaitGroup
	// waits ends before base: see CancelWaits.
	waits       context.Context
	cancelWaits context.CancelCauseFunc

	// mu guards the maps and lastCreated, and is never held while anything runs
	// or is written.
	mu     sync.RWMutex
	byID   map[string]*Container
	byName map[string]*Container
	// byPod are those of each sandbox that has any, the newest first.
	byPod map[string][]*Container
	// stopping are the sandboxes that StopPod was called for, until RemovePod.
	stopping map[string]bool
	// lastCreated is the newest creation time of any container, in nanoseconds
	// since 1970.
	lastCreated int64
}

// SetHandlerDefaults puts other Options.HandlerDefaults into force, for what
// begins from now on.
func (s *Store) SetHandlerDefaults(of map[string]oci.Defaults) { s.handlerDefaults.Store(&of) }

// SetLimits puts other limits into force, for what begins from now on.
func (s *Store) SetLimits(limits Limits) { s.limits.Store(&limits) }

// Find returns the container with the id, or the only one whose id starts so;
// errdefs.ErrNotFound if there is none.
func (s *Store) Find(wanted string) (*Container, error) {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return id.Find(s.byID, "container", wanted, func(c *Container) bool { return c.listed.Load() })
}

// List returns the listed containers, the newest first.
func (s *Store) List() []*Container {
	return s.all(func(c *Container) bool { return c.listed.Load() })
}

// ListPod returns the listed containers of one sandbox, the newest first.
func (s *Store) ListPod(sandboxID string) []*Container {
	return slices.DeleteFunc(s.OfPod(sandboxID), func(c *Container) bool { return !c.listed.Load() })
}

// OfPod returns all containers of a sandbox, listed or not, the newest first.
func (s *Store) OfPod(sandboxID string) []*Container {
	s.mu.RLock()
	defer s.mu.RUnlock()
	return slices.Clone(s.byPod[sandboxID])
}

// ofGroup returns those of one supervisor, listed or not.
func (s *Store) ofGroup(group string) []*Container {
	return s.all(func(c *Container) bool { return c.group() == group })
}

func (s *Store) all(match func(*Container) bool) []*Container {
	s.mu.RLock()
	list := make([]*Container, 0, len(s.byID))
	for _, c := range s.byID {
		if match(c) {
			list = append(list, c)
		}
	}
	s.mu.RUnlock()
	slices.SortFunc(list, newestFirst)
	return list
}

func newestFirst(a, b *Container) int { return cmp.Compare(b.CreatedAt, a.CreatedAt) }

// Quarantined are the files of records and facts that cannot be read.
func (s *Store) Quarantined() []string { return s.files.Quarantined() }

// explains reports whether what carries the id is to be there.
func (s *Store) explains(id string) bool { return s.files.LeftAlone(id) || s.exists(id) }

// add makes a container known; mu is held.
func (s *Store) add(c *Container) {
	s.byID[c.ID] = c
	pod := s.byPod[c.SandboxID]
	at, _ := slices.BinarySearchFunc(pod, c, newestFirst)
	s.byPod[c.SandboxID] = slices.Insert(pod, at, c)
}

func (s *Store) forget(c *Container) {
	s.mu.Lock()
	defer s.mu.Unlock()
	delete(s.byID, c.ID)
	s.byPod[c.SandboxID] = slices.DeleteFunc(s.byPod[c.SandboxID], func(other *Container) bool { return other == c })
	if len(s.byPod[c.SandboxID]) == 0 {
		delete(s.byPod, c.SandboxID)
	}
	if name := nameOf(c.SandboxID, c.config.GetMetadata()); s.byName[name] == c {
		delete(s.byName, name)
	}
}

// Close cancels what is under way and waits for it; supervisors and containers
// stay.
func (s *Store) Close() {
	s.cancel(errShutdown)
	s.work.Wait()
}

// CancelWaits ends the calls whose wait the caller can repeat with the next
// daemon, with errdefs.ErrUnavailable: the grace of Stop, the command of
// ExecSync, and Create, which undoes what it has made.
func (s *Store) CancelWaits() { s.cancelWaits(errShutdown) }

// repeatable returns ctx with an end at CancelWaits.
func (s *Store) repeatable(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.waits, func() { cancel(context.Cause(s.waits)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

var errShutdown = fmt.Errorf("minicri is shutting down: %w", errdefs.ErrUnavailable)

// dir is the volatile directory of a container: its config.json and its rootfs.
func (s *Store) dir(id string) string { return filepath.Join(s.options.State, "containers", id) }

func (s *Store) rootfs(id string) string { return filepath.Join(s.dir(id), "rootfs") }

// within bounds work of the daemon's own, which ends with it.
func (s *Store) within(limit time.Duration) (context.Context, context.CancelFunc) {
	return step.Bound(s.base, s.base, limit)
}

// outlive bounds work that continues when the caller is gone.
func (s *Store) outlive(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return step.Bound(ctx, context.Background(), limit)
}
