package container

import (
	"fmt"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/encoding/protojson"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/id"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/oci"
)

// reserve gives the name to the container, and takes its lock.
func (c *creation) reserve(config *runtimeapi.ContainerConfig, timeline *step.Timeline) error {
	record, err := c.record(config)
	if err != nil {
		return err
	}
	made := newContainer(record, config)
	name := nameOf(made.SandboxID, config.GetMetadata())
	s := c.owner
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.stopping[made.SandboxID] {
		return fmt.Errorf("sandbox %s is being stopped: %w", made.SandboxID, errdefs.ErrFailedPrecondition)
	}
	if other := s.byName[name]; other != nil {
		return fmt.Errorf("container %s has the name %s: remove it, or ask with a higher attempt: %w", other.ID, name, errdefs.ErrAlreadyExists)
	}
	if err := s.room(made); err != nil {
		return err
	}
	made.CreatedAt = s.nextCreated()
	made.timeline, made.abandon = timeline, c.abandon
	made.lock.TryLock() // no other goroutine has the container yet
	s.byName[name] = made
	s.add(made)
	c.Container = made
	return nil
}

// room refuses a container that would make the list of all too long; mu is held.
func (s *Store) room(made *Container) error {
	used := 0
	for _, other := range s.byID {
		used += other.listSize
	}
	return validate.Listed("container", len(s.byID), used, made.listSize)
}

// listSize is what a container takes in the list of all, without labels and annotations.
func listSize(record Record, config *runtimeapi.ContainerConfig) int {
	const framing = 8 // the item's own tag and length
	return framing + proto.Size(&runtimeapi.Container{
		Id: record.ID, PodSandboxId: record.SandboxID, Metadata: config.GetMetadata(), Image: config.GetImage(), ImageRef: record.ImageRef,
		ImageId: record.ImageID, State: runtimeapi.ContainerState_CONTAINER_EXITED, CreatedAt: time.Now().UnixNano(),
	})
}

// nextCreated is the creation time of a new container, later than that of all
// others; mu is held. The clock may jump back, and the kubelet takes the newest
// container of a name for the one that counts.
func (s *Store) nextCreated() int64 {
	s.lastCreated = max(s.lastCreated+1, time.Now().UnixNano())
	return s.lastCreated
}

func (c *creation) record(config *runtimeapi.ContainerConfig) (Record, error) {
	encoded, err := protojson.Marshal(config)
	if err != nil {
		return Record{}, fmt.Errorf("encode the config: %w", err)
	}
	made := id.New()
	o := c.owner.options
	parent := c.sandbox.Config().GetLinux().GetCgroupParent()
	if parent == "" {
		parent = o.CgroupParent
	}
	return Record{
		ID:          made,
		SandboxID:   c.sandbox.ID,
		Supervisor:  c.sandbox.Group(),
		CgroupsPath: oci.CgroupsPath(parent, o.Node.ContainerMark(), made, o.SystemdCgroup),
		ImageID:     c.image.ID,
		ImageRef:    imageRef(c.image),
		ImageTarget: c.image.Target.String(),
		ImageMounts: c.mounted,
		LogPath:     logPath(c.sandbox.Config().GetLogDirectory(), config, c.owner.dir(made)),
		StopSignal:  stopSignal(config.GetStopSignal(), c.image.Spec.Config.StopSignal),
		Config:      encoded,
	}, nil
}

// imageRef is what people see of the image: a digest, or else its id.
func imageRef(i image.Image) string {
	if len(i.RepoDigests) > 0 {
		return i.RepoDigests[0]
	}
	return i.ID
}

// logPath is never empty: the kubelet removes whatever begins with it. A
// container without a log gets a path that nothing has.
func logPath(directory string, config *runtimeapi.ContainerConfig, dir string) string {
	if directory == "" || config.GetLogPath() == "" {
		return filepath.Join(dir, "no-log")
	}
	return filepath.Join(directory, config.GetLogPath())
}
