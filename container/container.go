package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
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

	// factsLock is held while the facts are replaced and written. removed is set when
	// they must not be written any more.
	factsLock sync.Mutex
	removed   bool
	// output is held, under factsLock, as long as it may not be in the log.
	output *client.Output
	// abandon ends the container's creation; nil if this daemon has not made it.
	abandon context.CancelCauseFunc
	// ended is closed when the container has ended.
	ended chan struct{}
	// reaped is how its first process has ended, if it ended as our child; nil before.
	reaped atomic.Pointer[reaped]

	// announced is set once plugins know of the container, those that come later too;
	// stopAnnounced once they were notified of its end, under stopLock, which is held
	// while they are, and during a start.
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

// forgetEnvironment drops what is on disk and was needed to make the container
// only, of which there may be megabytes. The container is not visible yet.
func (c *Container) forgetEnvironment() {
	c.Record.Config = nil
	c.config = proto.CloneOf(c.config)
	c.config.Envs = nil
}

// Config is what the container was made from, without the environment. It must
// not be changed.
func (c *Container) Config() *runtimeapi.ContainerConfig { return c.config }

// State is the CRI's state, now.
func (c *Container) State() runtimeapi.ContainerState { return c.Facts().State() }

// Record is what a container was made from. It is written durably before anything
// else of the container exists, and once more only if an NRI plugin gives the
// container another cgroup, before that is made.
type Record struct {
	ID        string `json:"id"`
	SandboxID string `json:"sandbox_id"`
	// Supervisor is the group of its supervisor: the build that it is of.
	Supervisor string `json:"supervisor,omitempty"`
	// CreatedAt is in nanoseconds since 1970.
	CreatedAt   int64  `json:"created_at"`
	CgroupsPath string `json:"cgroups_path"`
	// ImageID is the image's id, ImageRef what the CRI shows of it.
	ImageID  string `json:"image_id"`
	ImageRef string `json:"image_ref"`
	// ImageTarget is the digest of the image's manifest or index.
	ImageTarget string `json:"image_target,omitempty"`
	// ImageMounts are the mounts of images, in the order of the config.
	ImageMounts []ImageMount `json:"image_mounts,omitempty"`
	// LogPath is absolute, and never empty.
	LogPath string `json:"log_path"`
	// StopSignal is the number of the signal that Stop sends.
	StopSignal uint32 `json:"stop_signal"`
	// Config is the CRI's ContainerConfig, as JSON.
	Config json.RawMessage `json:"config"`
}

// Facts are what became of a container. They outlive a reboot, for the exit.
type Facts struct {
	// BootID is the boot in which the process ran.
	BootID  string        `json:"boot_id"`
	Created bool          `json:"created,omitempty"`
	Process process.Facts `json:"process,omitzero"`
	// StartedAt and FinishedAt are in nanoseconds since 1970, 0 for not yet.
	StartedAt  int64 `json:"started_at,omitempty"`
	FinishedAt int64 `json:"finished_at,omitempty"`
	ExitCode   int32 `json:"exit_code,omitempty"`
	OOMKilled  bool  `json:"oom_killed,omitempty"`
	// StartError says why the container cannot be started, which shows when it
	// is made and is reported when it is started. No supervisor has such a container.
	StartError string `json:"start_error,omitempty"`
	// Message says why a container did not start, or is not known to have ended.
	Message string `json:"message,omitempty"`
	// Reason takes the place of the one that follows from the exit.
	Reason string `json:"reason,omitempty"`
	// User is the user of the first process, Resources what is in force, both
	// as JSON of the CRI's messages.
	User      json.RawMessage `json:"user,omitempty"`
	Resources json.RawMessage `json:"resources,omitempty"`
	// Timeline is on disk only; in memory the container has it.
	Timeline []step.Row `json:"timeline,omitempty"`
	// Unknown is set while the supervisor is gone.
	Unknown bool `json:"-"`
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

// inShim reports whether the container has a process, or has had one, that a
// supervisor knows of.
func (f *Facts) inShim() bool { return f.Created && f.StartError == "" }

// The reasons of an exit, as the kubelet and its users know them.
const (
	reasonCompleted  = "Completed"
	reasonError      = "Error"
	reasonOOMKilled  = "OOMKilled"
	reasonStartError = "StartError"
	reasonUnknown    = "Unknown"
)

// ExitReason says in a word why the container has ended, "" if it has not.
func (f *Facts) ExitReason() string {
	switch {
	case f.FinishedAt == 0:
		return ""
	case f.Reason != "":
		return f.Reason
	case f.OOMKilled:
		return reasonOOMKilled
	case f.ExitCode == 0:
		return reasonCompleted
	default:
		return reasonError
	}
}

func (r *Record) decodeConfig() (*runtimeapi.ContainerConfig, error) {
	config := &runtimeapi.ContainerConfig{}
	if err := (protojson.UnmarshalOptions{DiscardUnknown: true}).Unmarshal(r.Config, config); err != nil {
		return nil, fmt.Errorf("decode the config: %w", err)
	}
	if config.GetMetadata() == nil {
		return nil, errors.New("decode the config: it has no metadata")
	}
	return config, nil
}

// nameOf is what makes a container unique.
func nameOf(sandboxID string, m *runtimeapi.ContainerMetadata) string {
	return fmt.Sprintf("%s_%d_%s", m.GetName(), m.GetAttempt(), sandboxID)
}

// decode reads a message of the CRI that the facts hold as JSON, and reports whether
// they hold one.
func decode(encoded json.RawMessage, into proto.Message) bool {
	return len(encoded) > 0 && protojson.Unmarshal(encoded, into) == nil
}
