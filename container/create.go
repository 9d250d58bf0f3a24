package container

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/encoding/protojson"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/id"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/shim/api"
)

// creation is one way through the steps of Create. After the first error the
// steps that follow do nothing.
type creation struct {
	*Container
	owner   *Store
	sandbox *sandbox.Sandbox
	image   image.Image
	// mounted are images that the container mounts.
	mounted []ImageMount
	spec    *specs.Spec
	// ctx outlives the caller's.
	ctx, caller context.Context
	steps       *step.Sequence
}

// Create makes a container in a sandbox that is Ready, and returns its id. pod
// is the sandbox's config as the caller has it, nil if it has none; one of
// another pod is errdefs.ErrInvalidArgument. The container is destroyed when the
// caller goes away meanwhile: nothing is left waiting at the exec barrier that
// nobody knows of.
func (s *Store) Create(caller context.Context, sandboxID string, config *runtimeapi.ContainerConfig, pod *runtimeapi.PodSandboxConfig) (string, error) {
	ctx, cancel := s.outlive(caller, s.options.Limits.Create)
	defer cancel()
	ctx, stop := s.repeatable(ctx)
	defer stop()
	timeline := step.NewTimeline(nil)
	c := &creation{owner: s, ctx: ctx, caller: caller, steps: step.Begin(ctx, s.options.Observe, timeline)}
	c.steps.Step(stepCheck, func(context.Context) error { return c.check(sandboxID, config, pod) })
	c.steps.Step(stepReserve, func(context.Context) error { return c.reserve(config, timeline) })
	if c.Container == nil {
		return "", fmt.Errorf("create container in sandbox %s: %w", sandboxID, c.steps.Err())
	}
	defer c.lock.Unlock() // reserve locked it
	c.run()
	if c.steps.Err() != nil {
		return "", s.undo(c)
	}
	c.listed.Store(true)
	s.tell(c.Container, runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT)
	return c.ID, nil
}

// run goes through the steps 3 to 8.
func (c *creation) run() {
	c.owner.work.Go(cgroup.WarmLock)
	c.steps.Step(stepRecord, func(context.Context) error { return c.owner.records.Write(c.ID, c.Record) })
	c.steps.Step(stepRootfs, c.makeRootfs)
	c.steps.Step(stepSpec, c.writeSpec)
	c.steps.Step(stepShim, c.ensureShim)
	c.steps.Step(stepCreate, c.create)
	c.steps.Step(stepRecheck, c.recheck)
}

// recheck: a sandbox that was stopped meanwhile has not stopped this container,
// and a caller who is gone does not know its id.
func (c *creation) recheck(context.Context) error {
	if c.caller.Err() != nil {
		return context.Cause(c.caller)
	}
	if !c.sandbox.Ready() {
		return fmt.Errorf("sandbox %s was stopped meanwhile: %w", c.SandboxID, errdefs.ErrFailedPrecondition)
	}
	return nil
}

func (s *Store) undo(c *creation) error {
	ctx, cancel := s.outlive(c.ctx, s.options.Limits.Create)
	defer cancel()
	failure := c.steps.Err()
	c.failure.Store(&failure)
	err := fmt.Errorf("create container %s in sandbox %s: %w", c.ID, c.SandboxID, failure)
	if undoErr := s.destroy(ctx, c.Container); undoErr != nil {
		s.options.Logger.Error("a container that failed could not be taken back: remove it", "container", c.ID, "err", undoErr)
		writeErr := s.write(c.Container, func(f *Facts) { f.Message = failure.Error() })
		c.listed.Store(true) // as Created: its init may still wait
		return errors.Join(err, undoErr, writeErr)
	}
	if _, goneErr := s.options.Sandboxes.Find(c.SandboxID); errdefs.IsNotFound(goneErr) {
		return errors.Join(err, s.shims.forget(ctx, c.SandboxID)) // nobody else will
	}
	return err
}

func (c *creation) check(sandboxID string, config *runtimeapi.ContainerConfig, pod *runtimeapi.PodSandboxConfig) (err error) {
	if c.sandbox, err = c.owner.options.Sandboxes.Find(sandboxID); err != nil {
		return err
	}
	if err := checkPod(pod, c.sandbox); err != nil {
		return err
	}
	if !c.sandbox.Ready() {
		return fmt.Errorf("sandbox %s is not ready: %w", c.sandbox.ID, errdefs.ErrFailedPrecondition)
	}
	if err := validate.Container(config, c.sandbox.Config(), c.owner.options.Machine); err != nil {
		return err
	}
	if c.image, err = c.owner.options.Images.Get(config.GetImage().GetImage()); err != nil {
		return err
	}
	c.mounted, err = c.owner.findImages(config)
	return err
}

// checkPod refuses the config of another pod. Only what identifies a pod is
// compared: the kubelet makes the config anew for each container, with the
// annotations and resources that the pod has by then.
func checkPod(asked *runtimeapi.PodSandboxConfig, of *sandbox.Sandbox) error {
	if asked.GetMetadata() == nil {
		return nil
	}
	got, want := asked.GetMetadata(), of.Config().GetMetadata()
	var errs []error
	for _, field := range []struct{ name, got, want string }{
		{"uid", got.GetUid(), want.GetUid()},
		{"name", got.GetName(), want.GetName()},
		{"namespace", got.GetNamespace(), want.GetNamespace()},
	} {
		if field.got != field.want {
			errs = append(errs, fmt.Errorf("sandbox_config.metadata.%s: is %q, that of sandbox %s is %q", field.name, field.got, of.ID, field.want))
		}
	}
	if len(errs) > 0 {
		return fmt.Errorf("%w: %w", errdefs.ErrInvalidArgument, errors.Join(errs...))
	}
	return nil
}

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
	made.CreatedAt = s.nextCreated()
	made.timeline = timeline
	made.lock.TryLock() // no other goroutine has the container yet
	s.byName[name], s.byID[made.ID] = made, made
	c.Container = made
	return nil
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
		CgroupsPath: oci.CgroupsPath(parent, o.Mark, made, o.SystemdCgroup),
		ImageID:     c.image.ID,
		ImageRef:    imageRef(c.image),
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

func (c *creation) makeRootfs(ctx context.Context) error {
	images := c.owner.options.Images
	if _, _, err := images.Prepare(ctx, c.ID, c.ImageID, prepareOptions(c.sandbox.Config())); err != nil {
		return err
	}
	if err := images.Mount(ctx, c.ID, c.owner.rootfs(c.ID)); err != nil {
		return err
	}
	return c.mountImages(ctx)
}

// prepareOptions shift the owners of files in a pod with a user namespace.
func prepareOptions(pod *runtimeapi.PodSandboxConfig) image.PrepareOptions {
	userns := oci.UserNamespace(pod)
	if len(userns.GetUids()) == 0 || len(userns.GetGids()) == 0 {
		return image.PrepareOptions{}
	}
	return image.PrepareOptions{UIDs: idMap(userns.GetUids()[0]), GIDs: idMap(userns.GetGids()[0])}
}

func idMap(m *runtimeapi.IDMapping) *image.IDMap {
	return &image.IDMap{ContainerID: m.GetContainerId(), HostID: m.GetHostId(), Size: m.GetLength()}
}

// writeSpec makes the runtime-spec and puts it where the shim reads it.
func (c *creation) writeSpec(ctx context.Context) error {
	if err := c.owner.awaitHostPaths(ctx, c.config.GetMounts()); err != nil {
		return err
	}
	o := c.owner.options
	namespaces, err := c.owner.namespaces(c.sandbox, c.config)
	if err != nil {
		return err
	}
	sources, err := c.imageSources()
	if err != nil {
		return err
	}
	devices, err := c.owner.cdi.devices(c.config)
	if err != nil {
		return err
	}
	made := &oci.Container{
		ID: c.ID, SandboxID: c.SandboxID, Pod: c.sandbox.Config(), Config: c.config, Image: imageFacts(c.image),
		Rootfs: c.owner.rootfs(c.ID), Hostname: o.Sandboxes.Hostname(c.sandbox), Files: o.Sandboxes.PodFiles(c.sandbox),
		Namespaces: namespaces, VolumesDir: c.owner.volumes(c.ID), ImageMounts: sources,
		CgroupsPath: c.CgroupsPath, PidsLimit: o.PidsLimit, CDI: devices, Machine: o.Machine,
	}
	if err := makeSources(made); err != nil {
		return err
	}
	if err := fillVolumes(made); err != nil {
		return err
	}
	if err := readUsers(made); err != nil {
		return err
	}
	if c.spec, err = oci.ForContainer(made); err != nil {
		return err
	}
	if err := relabel(made, c.spec); err != nil {
		return err
	}
	encoded, err := json.Marshal(c.spec)
	if err != nil {
		return err
	}
	return os.WriteFile(filepath.Join(c.owner.dir(c.ID), "config.json"), encoded, 0o600)
}

func imageFacts(i image.Image) oci.Image {
	config := i.Spec.Config
	facts := oci.Image{
		Entrypoint: config.Entrypoint, Cmd: config.Cmd, Env: config.Env, WorkingDir: config.WorkingDir,
		User: config.User, StopSignal: config.StopSignal,
	}
	for volume := range config.Volumes {
		facts.Volumes = append(facts.Volumes, volume)
	}
	return facts
}

func (c *creation) ensureShim(ctx context.Context) error {
	if err := os.MkdirAll(filepath.Dir(c.LogPath), 0o755); err != nil {
		return err
	}
	_, err := c.owner.shimOf(ctx, c.SandboxID)
	return err
}

// create brings init to the barrier. One that cannot run the program says so
// here already; other runtimes say it at the start, and so does this one: the
// container is made, and cannot be started.
func (c *creation) create(ctx context.Context) error {
	shim, err := c.owner.shimOf(ctx, c.SandboxID)
	if err != nil {
		return err
	}
	answer, err := shim.Create(ctx, &api.CreateRequest{
		Id: c.ID, Bundle: c.owner.dir(c.ID), LogPath: c.shimLog(), Stdin: c.config.GetStdin(), StdinOnce: c.config.GetStdinOnce(),
	})
	startError := ""
	if errdefs.IsFailedPrecondition(err) {
		startError, err = err.Error(), nil
	}
	if err != nil {
		return err
	}
	user, err := protojson.Marshal(oci.UserOf(c.spec))
	if err != nil {
		return err
	}
	resources, err := protojson.Marshal(inForce(c.config.GetLinux().GetResources(), c.spec.Linux.Resources, *c.spec.Process.OOMScoreAdj))
	if err != nil {
		return err
	}
	return c.owner.write(c.Container, func(f *Facts) {
		f.BootID, f.Created, f.User, f.Resources, f.StartError = c.owner.bootID, true, user, resources, startError
		f.Process = process.Facts{PID: int(answer.GetPid()), StartTime: answer.GetStartTime()}
	})
}

// shimLog is "" for a container that has no log.
func (c *creation) shimLog() string {
	if c.config.GetLogPath() == "" || c.sandbox.Config().GetLogDirectory() == "" {
		return ""
	}
	return c.LogPath
}
