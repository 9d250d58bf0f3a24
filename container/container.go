package container

import (
	"context"
	"encoding/json"
	"fmt"
	"reflect"
	"sync"
	"sync/atomic"
	"time"

	"golang.org/x/sync/semaphore"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/supervisor/client"
)

// Container is one application container.
type Container struct {
	Record
	object.Object[Facts]
	config *runtimeapi.ContainerConfig

	// factsLock is held while facts are replaced and written. Once removed is set, they are only replaced in memory: the
	// container is listed if its record could not be removed, and its end must still be noted.
	factsLock sync.Mutex
	removed   bool
	unwritten bool                    // the last change is not on disk
	held      *client.Held            // guarded by factsLock; nil before it is made
	abandon   context.CancelCauseFunc // ends the creation; nil unless this daemon made the container
	ended     chan struct{}           // closed when the container has ended
	reaped    atomic.Pointer[reaped]  // how the first process ended, if it was reaped as our child

	startFailed string // why its start failed, which its end tells; guarded by factsLock

	template atomic.Pointer[execTemplate] // nil before the first command

	// announced is set once plugins, later ones included, know of the container. stopLock guards
	// stopAnnounced, which is set when they learn of the end. A start holds stopLock, too.
	announced     atomic.Bool
	stopAnnounced bool
	stopLock      *semaphore.Weighted
}

func newContainer(record Record, config *runtimeapi.ContainerConfig) *Container {
	c := &Container{Record: record, config: config, ended: make(chan struct{}), stopLock: semaphore.NewWeighted(1)}
	const framing = 8 // the item's own tag and length in the list
	size := framing + proto.Size(&runtimeapi.Container{
		Id: record.ID, PodSandboxId: record.SandboxID, Metadata: config.GetMetadata(), Image: config.GetImage(), ImageRef: record.ImageRef,
		ImageId: record.ImageID, State: runtimeapi.ContainerState_CONTAINER_EXITED, CreatedAt: time.Now().UnixNano(),
	})
	c.Init("container", object.Key{ID: record.ID, Name: nameOf(record.SandboxID, config.GetMetadata()), Created: record.CreatedAt, Size: size})
	return c
}

// forgetEnvironment drops what only the creation needed, perhaps megabytes, before the container is visible.
func (c *Container) forgetEnvironment() {
	c.Record.Config = nil
	c.config = proto.CloneOf(c.config)
	c.config.Envs = nil
}

// Config is what the container was made from, without the environment. It is read-only.
func (c *Container) Config() *runtimeapi.ContainerConfig { return c.config }

// State is the CRI's state.
func (c *Container) State() runtimeapi.ContainerState { return c.Facts().State() }

// Record is what a container was made from. It is durable before anything else of the container exists.
// It is written again only if an NRI plugin chooses another cgroup, before that cgroup is made.
type Record struct {
	ID          string          `json:"id"`
	SandboxID   string          `json:"sandbox_id"`
	Supervisor  string          `json:"supervisor,omitempty"` // the group of its supervisor, which names a build
	CreatedAt   int64           `json:"created_at"`           // in nanoseconds since 1970
	CgroupsPath string          `json:"cgroups_path"`
	ImageID     string          `json:"image_id"`
	ImageRef    string          `json:"image_ref"`              // what the CRI shows of the image
	ImageTarget string          `json:"image_target,omitempty"` // the digest of the image's manifest or index
	ImageMounts []ImageMount    `json:"image_mounts,omitempty"` // in the order of the config
	LogPath     string          `json:"log_path"`               // absolute, never empty
	StopSignal  uint32          `json:"stop_signal"`            // the signal that Stop sends
	Config      json.RawMessage `json:"config"`                 // the CRI's ContainerConfig
}

// Facts are what became of a container. The exit makes them outlive a reboot.
type Facts struct {
	BootID  string        `json:"boot_id"` // the boot in which the process ran
	Created bool          `json:"created,omitempty"`
	Process process.Facts `json:"process,omitzero"`
	// StartedAt and FinishedAt are in nanoseconds since 1970, 0 for not yet.
	StartedAt  int64 `json:"started_at,omitempty"`
	FinishedAt int64 `json:"finished_at,omitempty"`
	ExitCode   int32 `json:"exit_code,omitempty"`
	OOMKilled  bool  `json:"oom_killed,omitempty"`
	// StartError says why it cannot start. It is found at the creation; no supervisor has such a container.
	StartError string `json:"start_error,omitempty"`
	Message    string `json:"message,omitempty"` // why it did not start, or why its end is not known
	Reason     string `json:"reason,omitempty"`  // overrides the reason that follows from the exit
	// User is the first process's, Resources are in force; both are messages of the CRI.
	User      json.RawMessage `json:"user,omitempty"`
	Resources json.RawMessage `json:"resources,omitempty"`
	Timeline  []step.Row      `json:"timeline,omitempty"` // on disk only
	Unknown   bool            `json:"-"`                  // no supervisor knows the state
}

// State is the CRI's state.
func (f *Facts) State() runtimeapi.ContainerState {
	switch {
	case f.FinishedAt != 0:
		return runtimeapi.ContainerState_CONTAINER_EXITED
	case f.Unknown:
		return runtimeapi.ContainerState_CONTAINER_UNKNOWN
	case f.StartedAt != 0:
		return runtimeapi.ContainerState_CONTAINER_RUNNING
	default:
		return runtimeapi.ContainerState_CONTAINER_CREATED
	}
}

// supervised reports whether a supervisor knows, or knew, a process of the container.
func (f *Facts) supervised() bool { return f.Created && f.StartError == "" }

// reasonStartError is the reason of an exit that the kubelet knows; ExitReason has more.
const reasonStartError = "StartError"

// ExitReason returns why the container ended, in a word, or "" if it has not.
func (f *Facts) ExitReason() string {
	switch {
	case f.FinishedAt == 0:
		return ""
	case f.Reason != "":
		return f.Reason
	case f.OOMKilled:
		return "OOMKilled"
	case f.ExitCode == 0:
		return "Completed"
	default:
		return "Error"
	}
}

// nameOf returns what is unique to a container.
func nameOf(sandboxID string, m *runtimeapi.ContainerMetadata) string {
	return fmt.Sprintf("%s_%d_%s", m.GetName(), m.GetAttempt(), sandboxID)
}

// decode reads a CRI message from the facts and reports whether they hold one.
func decode(encoded json.RawMessage, into proto.Message) bool {
	return len(encoded) > 0 && protojson.Unmarshal(encoded, into) == nil
}

// write changes the facts, in memory and, unless they were removed, on disk, and emits the event. It
// wakes those who wait for the end last: what they do next follows the events.
func (s *Store) write(c *Container, change func(*Facts)) (err error) {
	c.factsLock.Lock()
	defer c.factsLock.Unlock()
	before := c.Facts()
	after := c.Update(change)
	ended := before.FinishedAt == 0 && after.FinishedAt != 0
	switch {
	case after.FinishedAt != 0:
		c.held.Release()
	case c.held == nil && after.supervised() && !c.removed:
		pod := s.options.Sandboxes.Dir(c.SandboxID)
		c.held = client.Hold(pod, s.options.Supervisors.Dir(c.Supervisor), c.ID, after.Process)
	}
	if ended {
		c.noteExit(after)
		s.log(c).Info("container ended", "code", after.ExitCode, "reason", after.ExitReason(), "oom", after.OOMKilled)
		if s.options.ObserveExit != nil {
			s.options.ObserveExit(after.ExitReason())
		}
	}
	onDisk, unchanged := *after, *before
	unchanged.Unknown = after.Unknown // which is not written: a restart leaves the file as it is
	if !c.removed && (c.unwritten || !reflect.DeepEqual(onDisk, unchanged)) {
		onDisk.Timeline = c.Timeline()
		err = s.files.Facts.Write(c.ID, onDisk)
		c.unwritten = err != nil // the next change writes it, whatever it changes
	}
	// A failed start only ends. Both may happen while no daemon runs.
	if before.StartedAt == 0 && after.StartedAt != 0 && after.Reason != reasonStartError {
		s.emit(c, runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
	}
	if ended {
		s.emit(c, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
		close(c.ended)
		s.Go(func() {
			ctx, cancel := s.within(s.options.Sandboxes.Limits().Create)
			defer cancel()
			s.announceStop(ctx, c)
		})
	}
	return err
}

// change is write outside of an operation: it waits for none, and logs the error.
func (s *Store) change(c *Container, change func(*Facts)) {
	if err := s.write(c, change); err != nil {
		s.log(c).Error("the facts of a container are not on disk", "err", err)
	}
}

// show lists a container that is made. If it has ended meanwhile, show emits its end, too.
func (s *Store) show(c *Container) {
	c.factsLock.Lock()
	defer c.factsLock.Unlock()
	c.Show()
	s.emit(c, runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT)
	if c.Facts().FinishedAt != 0 {
		s.emit(c, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
	}
}

func (s *Store) emit(c *Container, kind runtimeapi.ContainerEventType) {
	if s.options.Events != nil && c.Listed() {
		s.options.Events.ContainerEvent(c, kind)
	}
}
