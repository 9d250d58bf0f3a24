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

	"golang.org/x/sync/semaphore"
	"golang.org/x/sync/singleflight"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/state"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/supervisor/client"
)

// Options say how containers are made.
type Options struct {
	sandbox.Options // those of the pods; Supervisors, Events and Plugins below are for containers
	Sandboxes       *sandbox.Store
	Supervisors     Supervisors
	Images          Images
	PidsLimit       int64                   // the most processes of a container; 0 for no limit
	CDIDirs         []string                // where vendors describe their devices
	HandlerDefaults map[string]oci.Defaults // by runtime handler, instead of Defaults
	Places          Orphans                 // where orphans of pods and containers are searched
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

// Store holds all containers of the node.
type Store struct {
	*object.Store[*Container]
	options         Options
	handlerDefaults atomic.Pointer[map[string]oci.Defaults] // those in force
	bootID          string
	files           *state.Objects[Record, Facts]
	hostPaths       singleflight.Group  // the host paths that mounts wait for
	logDirs         singleflight.Group  // the logs whose directories are being made
	stopping        sync.Map            // the sandboxes between StopPod and RemovePod
	captured        client.Captured     // by ExecSync
	users           *semaphore.Weighted // held by the creation that reads the users of its image
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

// The names of the steps of a container, in the order of doc.go. Undo and recovery do those of remove.
const (
	stepCheck        step.Name = "container/check"
	stepReserve      step.Name = "container/reserve"
	stepRecord       step.Name = "container/record"
	stepRootfs       step.Name = "container/rootfs"
	stepSources      step.Name = "container/sources"
	stepSpec         step.Name = "container/spec"
	stepVolumes      step.Name = "container/volumes"
	stepNRICreate    step.Name = "container/nri create"
	stepLabels       step.Name = "container/labels"
	stepSupervisor   step.Name = "container/supervisor"
	stepCreate       step.Name = "container/create"
	stepNRICreated   step.Name = "container/nri created"
	stepRecheck      step.Name = "container/recheck"
	stepNRIStart     step.Name = "container/nri start"
	stepStart        step.Name = "container/start"
	stepNRIStarted   step.Name = "container/nri started"
	stepNRIUpdate    step.Name = "container/nri update"
	stepNRIUpdated   step.Name = "container/nri updated"
	stepKill         step.Name = "container/kill"
	stepNRIStop      step.Name = "container/nri stop"
	stepNRIRemove    step.Name = "container/nri remove"
	stepDelete       step.Name = "container/delete"
	stepRemoveRootfs step.Name = "container/remove rootfs"
	stepRemoveRecord step.Name = "container/remove record"
)

func (s *Store) begin(ctx context.Context, c *Container) *step.Sequence {
	return step.Begin(ctx, s.options.Observe, c.Rows)
}

// keepLife writes the timeline of a container, by its name or NAMESPACE/POD/CONTAINER while the pod exists.
func (s *Store) keepLife(id, sandboxID string, m *runtimeapi.ContainerMetadata, failure error, rows []step.Row) {
	life := step.Life{Kind: "container", ID: id, Pod: sandboxID, Name: m.GetName(), Attempt: m.GetAttempt(), End: time.Now(), Rows: rows}
	if pod, err := s.options.Sandboxes.Find(sandboxID); err == nil {
		of := pod.Config().GetMetadata()
		life.Name = of.GetNamespace() + "/" + of.GetName() + "/" + life.Name
	}
	if failure != nil {
		life.Error = failure.Error()
	}
	object.Keep(s.options.Lives, s.options.Logger, life)
}

func (s *Store) log(c *Container) *slog.Logger {
	names := []any{"sandbox", c.SandboxID}
	if pod, err := s.options.Sandboxes.Find(c.SandboxID); err == nil {
		names = pod.Names()
	}
	return s.options.Logger.With(append(names, "container", c.config.GetMetadata().GetName(), "id", c.ID, "image", c.config.GetImage().GetImage())...)
}

func (c *Container) noteExit(f *Facts) {
	began := cmp.Or(f.StartedAt, f.FinishedAt)
	row := step.Row{Kind: "exit", Step: "ran", Start: time.Unix(0, began), Took: time.Duration(f.FinishedAt - began)}
	row.Note = fmt.Sprintf("%s, exit code %d", f.ExitReason(), f.ExitCode)
	switch limit := c.Resources().GetMemoryLimitInBytes(); {
	case f.OOMKilled && limit > 0:
		row.Error = fmt.Sprintf("the kernel killed it because it used all of its memory, %d MiB: raise the container's memory limit", limit>>20)
	case f.OOMKilled:
		row.Error = "the kernel killed it because its pod or the node had no memory left"
	case f.Message != "":
		row.Error = f.Message
	}
	c.Rows.Add(row)
}
