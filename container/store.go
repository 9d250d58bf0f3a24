package container

import (
	"context"
	"path/filepath"
	"slices"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/singleflight"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/sweep"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/supervisor/client"
)

// Options say how containers are made.
type Options struct {
	sandbox.Options // those of the pods; Events and Plugins below are for containers
	Sandboxes       *sandbox.Store
	Images          Images
	PidsLimit       int64                   // the most processes of a container; 0 for no limit
	CDIDirs         []string                // where vendors describe their devices
	HandlerDefaults map[string]oci.Defaults // by runtime handler, instead of Defaults
	Places          *sweep.Places           // where orphans of pods and containers are searched
	// ObserveExit, if set, counts ended containers by the CRI's reason, ObserveLost dead supervisors.
	ObserveExit func(reason string)
	ObserveLost func()
	Events      Events  // nil for none
	Plugins     Plugins // nil if there never are any
}

// Events receives a container's events, under the lock of its facts. It must not block.
type Events interface {
	ContainerEvent(c *Container, kind runtimeapi.ContainerEventType)
}

// Images is what containers are made from.
type Images interface {
	Get(refOrID string) (image.Image, error)
	Prepare(ctx context.Context, key, imageID string, options image.PrepareOptions) error
	Mount(ctx context.Context, key, target, label string) error
	Unmount(target string) error
	RemoveSnapshot(ctx context.Context, key string) error
	// Snapshots returns the keys of all that Prepare made.
	Snapshots(ctx context.Context) ([]string, error)
}

// Store holds all containers of the node.
type Store struct {
	*object.Store[*Container]
	options         Options
	handlerDefaults atomic.Pointer[map[string]oci.Defaults] // those in force
	bootID          string
	files           *state.Objects[Record, Facts]
	hostPaths       singleflight.Group // the host paths that mounts wait for
	stopping        sync.Map           // the sandboxes between StopPod and RemovePod
	captured        client.Captured    // by ExecSync
}

// SetHandlerDefaults replaces Options.HandlerDefaults for what begins from now on.
func (s *Store) SetHandlerDefaults(of map[string]oci.Defaults) { s.handlerDefaults.Store(&of) }

// defaultsOf returns the defaults of a pod's runtime handler.
func (s *Store) defaultsOf(pod *sandbox.Sandbox) oci.Defaults {
	if own, has := (*s.handlerDefaults.Load())[pod.Handler()]; has {
		return own
	}
	return s.options.Defaults
}

// ListPod returns the listed containers of one sandbox, the newest first.
func (s *Store) ListPod(sandboxID string) []*Container {
	return slices.DeleteFunc(s.ofPod(sandboxID), func(c *Container) bool { return !c.Listed() })
}

// ofPod returns all containers of a sandbox, listed or not, the newest first.
func (s *Store) ofPod(sandboxID string) []*Container {
	return s.All(func(c *Container) bool { return c.SandboxID == sandboxID })
}

// ofGroup returns all containers of a supervisor, listed or not.
func (s *Store) ofGroup(group string) []*Container {
	return s.All(func(c *Container) bool { return c.Supervisor == group })
}

// Quarantined returns the files of unreadable records and facts.
func (s *Store) Quarantined() []string { return s.files.Quarantined() }

// explains reports whether things that carry the id have an owner.
func (s *Store) explains(id string) bool { return s.files.LeftAlone(id) || s.Exists(id) }

// Close cancels and awaits what is under way; supervisors and containers stay.
func (s *Store) Close() { s.Store.Close(s.options.Sandboxes.Limits().Create, s.options.Logger) }

// repeatable also ends ctx at Cancel, for calls that the caller can repeat with the next daemon: Stop
// in its grace, ExecSync, and Create, which undoes what it has made.
func (s *Store) repeatable(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.Waits, func() { cancel(context.Cause(s.Waits)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// within bounds the daemon's own work, which ends with the daemon.
func (s *Store) within(limit time.Duration) (context.Context, context.CancelFunc) {
	return step.Bound(s.Base, s.Base, limit)
}

// outlive bounds work that continues without the caller.
func (s *Store) outlive(ctx context.Context) (context.Context, context.CancelFunc) {
	return step.Bound(ctx, context.Background(), s.options.Sandboxes.Limits().Create)
}

// dir is the volatile directory of a container, its bundle.
func (s *Store) dir(id string) string { return filepath.Join(s.options.State, "containers", id) }

func (s *Store) rootfs(id string) string { return filepath.Join(s.dir(id), "rootfs") }
