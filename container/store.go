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
)

// Options say what containers are made with.
type Options struct {
	// Options are those of the pods, but for Events and Plugins.
	sandbox.Options
	Sandboxes *sandbox.Store
	Images    Images
	// PidsLimit is the most processes of a container, 0 for no limit.
	PidsLimit int64
	// CDIDirs are where vendors describe their devices.
	CDIDirs []string
	// HandlerDefaults are the Defaults of runtime handlers that have others.
	HandlerDefaults map[string]oci.Defaults
	// Places are where orphans of pods and containers are looked for.
	Places *sweep.Places
	// ObserveExit counts each container that has ended, with the CRI's reason,
	// ObserveLost each supervisor that has died; nil if nothing does.
	ObserveExit func(reason string)
	ObserveLost func()
	// Events receives what happens to containers; nil if nothing does.
	Events Events
	// Plugins take part in the lives of containers; nil if there never are any.
	Plugins Plugins
}

// Events receives what has happened to a container, under the lock of its facts.
// It must not block.
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
	// Snapshots are the keys of all that Prepare made.
	Snapshots(ctx context.Context) ([]string, error)
}

// Store are all containers of this node.
type Store struct {
	*object.Store[*Container]
	options Options
	// handlerDefaults are those in force, see SetHandlerDefaults.
	handlerDefaults atomic.Pointer[map[string]oci.Defaults]
	bootID          string
	files           *state.Objects[Record, Facts]
	// hostPaths are the paths of mounts that are being looked at.
	hostPaths singleflight.Group
	// stopping has the ids of sandboxes from StopPod to RemovePod.
	stopping sync.Map
}

// SetHandlerDefaults puts other Options.HandlerDefaults into force, for what
// begins from now on.
func (s *Store) SetHandlerDefaults(of map[string]oci.Defaults) { s.handlerDefaults.Store(&of) }

// defaultsOf are those of a pod's runtime handler.
func (s *Store) defaultsOf(pod *sandbox.Sandbox) oci.Defaults {
	if own, has := (*s.handlerDefaults.Load())[pod.Handler()]; has {
		return own
	}
	return s.options.Defaults
}

// limits are those in force.
func (s *Store) limits() *sandbox.Limits { return s.options.Sandboxes.Limits() }

// ListPod returns the listed containers of one sandbox, the newest first.
func (s *Store) ListPod(sandboxID string) []*Container {
	return slices.DeleteFunc(s.OfPod(sandboxID), func(c *Container) bool { return !c.Listed() })
}

// OfPod returns all containers of a sandbox, listed or not, the newest first.
func (s *Store) OfPod(sandboxID string) []*Container {
	return s.All(func(c *Container) bool { return c.SandboxID == sandboxID })
}

// ofGroup returns those of one supervisor, listed or not.
func (s *Store) ofGroup(group string) []*Container {
	return s.All(func(c *Container) bool { return c.Supervisor == group })
}

// Quarantined are the files of records and facts that cannot be read.
func (s *Store) Quarantined() []string { return s.files.Quarantined() }

// explains reports whether what carries the id is to be there.
func (s *Store) explains(id string) bool { return s.files.LeftAlone(id) || s.Exists(id) }

// Close cancels what is under way and waits for it; supervisors and containers
// stay.
func (s *Store) Close() { s.Store.Close(s.limits().Create, s.options.Logger) }

// repeatable returns ctx with an end at Cancel, for calls whose wait the caller can repeat
// with the next daemon: the grace of Stop, the command of ExecSync, and Create, which
// undoes what it has made.
func (s *Store) repeatable(ctx context.Context) (context.Context, context.CancelFunc) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.Base, func() { cancel(context.Cause(s.Base)) })
	return ctx, func() {
		stop()
		cancel(nil)
	}
}

// within bounds work of the daemon's own, which ends with it.
func (s *Store) within(limit time.Duration) (context.Context, context.CancelFunc) {
	return step.Bound(s.Base, s.Base, limit)
}

// outlive bounds work that continues when the caller is gone.
func (s *Store) outlive(ctx context.Context) (context.Context, context.CancelFunc) {
	return step.Bound(ctx, context.Background(), s.limits().Create)
}

// dir is the volatile directory of a container: its config.json and its rootfs.
func (s *Store) dir(id string) string { return filepath.Join(s.options.State, "containers", id) }

func (s *Store) rootfs(id string) string { return filepath.Join(s.dir(id), "rootfs") }
