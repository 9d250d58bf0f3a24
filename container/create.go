package container

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"time"

	"github.com/containerd/errdefs"
	"golang.org/x/sys/unix"
	"google.golang.org/protobuf/encoding/protojson"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/errtext"
	"github.com/minicri/minicri/internal/object"
	"github.com/minicri/minicri/internal/process"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/oci"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/supervisor/api"
	"github.com/minicri/minicri/supervisor/client"
)

// creation is one pass through the steps of Create. After an error the remaining steps do nothing.
type creation struct {
	*Container
	owner      *Store
	sandbox    *sandbox.Sandbox
	image      image.Image
	mounted    []ImageMount   // the images that the container mounts
	parts      *oci.Container // what the plan is made from
	plan       oci.Plan
	labels     oci.SELinux
	joined     map[int]sandbox.Process // by pid, the processes whose namespaces it joins
	supervisor *client.Client          // the pod's
	ctx        context.Context
	steps      *step.Sequence
}

// Create makes a container in a Ready sandbox, and returns its id. pod, if any, is the caller's copy of
// the sandbox's config. If the caller goes away, nobody knows the id, so the container is destroyed.
func (s *Store) Create(caller context.Context, sandboxID string, config *runtimeapi.ContainerConfig, pod *runtimeapi.PodSandboxConfig) (string, error) {
	limit := s.options.Sandboxes.Limits().Create
	ctx, cancel := context.WithTimeoutCause(caller, limit, fmt.Errorf("not done within %v: %w", limit, context.DeadlineExceeded))
	defer cancel()
	ctx, stop := s.repeatable(ctx)
	defer stop()
	ctx, abandon := context.WithCancelCause(ctx)
	defer abandon(nil)
	timeline := step.NewTimeline(nil)
	c := &creation{owner: s, ctx: ctx, joined: make(map[int]sandbox.Process), steps: step.Begin(ctx, s.options.Observe, timeline)}
	c.steps.Step(stepCheck, func(context.Context) error { return c.check(sandboxID, config, pod) })
	c.steps.Step(stepReserve, func(context.Context) error { return c.reserve(config, timeline, abandon) })
	if c.Container == nil {
		if c.sandbox != nil { // it was refused before it had an id
			name := nameOf(c.sandbox.ID, config.GetMetadata())
			s.keepLife(step.RefusedID("container", name), c.sandbox.ID, config.GetMetadata(), c.steps.Err(), timeline.Rows())
		}
		return "", fmt.Errorf("create container in sandbox %s: %w", sandboxID, c.steps.Err())
	}
	defer c.Unlock() // reserve locked it
	c.run()
	for _, joined := range c.joined {
		_ = joined.Close() // a descriptor of ours: that cannot fail
	}
	if c.steps.Err() != nil {
		return "", s.undo(c)
	}
	c.forgetEnvironment()
	s.show(c.Container)
	return c.ID, nil
}

func (c *creation) run() {
	c.steps.Step(stepRecord, func(context.Context) error { return c.owner.files.Records.Write(c.ID, c.Record) })
	c.steps.Step(stepRootfs, c.makeRootfs)
	c.steps.Step(stepSources, c.makeSources)
	c.steps.Step(stepSpec, c.writeSpec)
	c.steps.Step(stepVolumes, c.fillVolumes)
	// From here on plugins, later ones included, know of the container and learn of its end.
	c.announced.Store(c.steps.Err() == nil)
	if c.owner.hasPlugins() {
		c.steps.Step(stepNRICreate, c.adjust)
	}
	c.steps.Step(stepLabels, c.relabel)
	c.steps.Step(stepSupervisor, func(ctx context.Context) error {
		_, err := object.Await(ctx, &c.owner.logDirs, c.LogPath, func() (string, error) { return "", c.makeLogDirectory() })
		if err == nil {
			c.supervisor, err = c.owner.options.Supervisors.Ensure(ctx, c.Supervisor)
		}
		return err
	})
	c.steps.Step(stepCreate, c.create)
	c.owner.announce(c.steps, c.Container, stepNRICreated, Plugins.Created)
	c.steps.Step(stepRecheck, c.recheck)
}

// recheck fails if the sandbox was stopped, or if a process whose namespace was joined has ended: its pid may be
// another's now.
func (c *creation) recheck(context.Context) error {
	for pid, joined := range c.joined {
		if joined.Ended() {
			return fmt.Errorf("process %d, whose namespaces it was to join, has ended: %w", pid, errdefs.ErrFailedPrecondition)
		}
	}
	if !c.sandbox.Ready() {
		return fmt.Errorf("sandbox %s was stopped while the container was being created: %w", c.SandboxID, errdefs.ErrFailedPrecondition)
	}
	return nil
}

func (s *Store) undo(c *creation) error {
	ctx, cancel := s.outlive(c.ctx)
	defer cancel()
	c.Failure = c.steps.Err()
	err := fmt.Errorf("create container %s in sandbox %s: %w", c.ID, c.SandboxID, c.Failure)
	if undoErr := s.destroy(ctx, c.Container); undoErr != nil {
		s.log(c.Container).Error("a container that failed could not be rolled back: remove it", "err", undoErr)
		writeErr := s.write(c.Container, func(f *Facts) { f.Message = c.Failure.Error() })
		c.Show() // as Created: its init may still wait
		return errors.Join(err, undoErr, writeErr)
	}
	return err
}

// reserve gives the container its name, and takes its lock.
func (c *creation) reserve(config *runtimeapi.ContainerConfig, timeline *step.Timeline, abandon context.CancelCauseFunc) error {
	record, err := c.record(config)
	if err != nil {
		return err
	}
	made := newContainer(record, config)
	made.Rows, made.abandon = timeline, abandon
	made.LockNew()
	other, err := c.owner.Reserve(made, func(created int64) { made.CreatedAt = created })
	if err != nil {
		return err
	}
	if other != nil {
		return fmt.Errorf("container %s has the name %s: remove it, or ask with a higher attempt: %w", other.ID, nameOf(made.SandboxID, config.GetMetadata()), errdefs.ErrAlreadyExists)
	}
	// From here on StopPod sees the container.
	if _, is := c.owner.stopping.Load(made.SandboxID); is {
		c.owner.Forget(made)
		made.Unlock()
		return fmt.Errorf("sandbox %s is being stopped: %w", made.SandboxID, errdefs.ErrFailedPrecondition)
	}
	c.Container = made
	return nil
}

func (c *creation) record(config *runtimeapi.ContainerConfig) (Record, error) {
	encoded, err := protojson.Marshal(config)
	if err != nil {
		return Record{}, fmt.Errorf("encode the config: %w", err)
	}
	o, pod := c.owner.options, c.sandbox.Config()
	id := o.Node.NewID()
	ref := c.image.ID // what people see of the image is a digest, if it has one
	if len(c.image.RepoDigests) > 0 {
		ref = c.image.RepoDigests[0]
	}
	// The kubelet removes whatever begins with the path, so it is never empty.
	logPath := filepath.Join(c.owner.dir(id), "no-log")
	if pod.GetLogDirectory() != "" && config.GetLogPath() != "" {
		logPath = filepath.Join(pod.GetLogDirectory(), config.GetLogPath())
	}
	parent := cmp.Or(pod.GetLinux().GetCgroupParent(), o.CgroupParent)
	return Record{
		ID: id, SandboxID: c.sandbox.ID, Supervisor: c.sandbox.Supervisor,
		CgroupsPath: oci.CgroupsPath(parent, id, o.SystemdCgroup),
		ImageID:     c.image.ID, ImageRef: ref, ImageTarget: c.image.Target.String(), ImageMounts: c.mounted,
		LogPath: logPath, StopSignal: stopSignal(config.GetStopSignal(), c.image.Spec.Config.StopSignal),
		Config: encoded,
	}, nil
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
	if err := c.checkImageHandlers(config); err != nil {
		return err
	}
	if c.image, err = c.owner.options.Images.Get(config.GetImage().GetImage()); err != nil {
		return err
	}
	if c.mounted, err = c.owner.findImages(config); err != nil {
		return err
	}
	o := c.owner.options
	return oci.CheckCommand(&oci.Container{
		Pod: c.sandbox.Config(), Config: config, Image: imageFacts(c.image), Hostname: o.Sandboxes.Hostname(c.sandbox),
		Machine: o.Machine, Defaults: c.owner.defaultsOf(c.sandbox),
	})
}

// checkImageHandlers refuses images for unknown handlers. The pod's own may be gone from the configuration.
func (c *creation) checkImageHandlers(config *runtimeapi.ContainerConfig) error {
	known := append(c.owner.options.Handlers.Names(), "", c.sandbox.RuntimeHandler)
	check := func(field string, image *runtimeapi.ImageSpec) error {
		if slices.Contains(known, image.GetRuntimeHandler()) {
			return nil
		}
		return fmt.Errorf("%s.runtime_handler: %q is unknown, this runtime has %q: %w", field, image.GetRuntimeHandler(), c.owner.options.Handlers.Names(), errdefs.ErrInvalidArgument)
	}
	errs := []error{check("config.image", config.GetImage())}
	for i, m := range config.GetMounts() {
		errs = append(errs, check(fmt.Sprintf("config.mounts[%d].image", i), m.GetImage()))
	}
	return errors.Join(errs...)
}

// checkPod refuses the config of another pod. Annotations and resources may differ.
func checkPod(asked *runtimeapi.PodSandboxConfig, of *sandbox.Sandbox) error {
	if asked.GetWindows() != nil {
		return fmt.Errorf("sandbox_config.windows: is set, but this node runs Linux: %w", errdefs.ErrInvalidArgument)
	}
	if asked.GetMetadata() == nil {
		return nil
	}
	got, want := asked.GetMetadata(), of.Config().GetMetadata()
	var errs []error
	for field, values := range map[string][2]string{
		"uid": {got.GetUid(), want.GetUid()}, "name": {got.GetName(), want.GetName()}, "namespace": {got.GetNamespace(), want.GetNamespace()},
	} {
		if values[0] != values[1] {
			errs = append(errs, fmt.Errorf("sandbox_config.metadata.%s: is %q, that of sandbox %s is %q: %w", field, values[0], of.ID, values[1], errdefs.ErrInvalidArgument))
		}
	}
	return errors.Join(errs...)
}

// create brings init to the barrier. libcontainer already knows here if the program cannot run; other
// runtimes say it at the start, so the container is made and its start fails.
func (c *creation) create(ctx context.Context) error {
	handler, err := c.owner.options.Handlers.Find(ctx, c.sandbox.Handler())
	if err != nil {
		return err
	}
	if err := checkAbility(c.plan.Spec, handler); err != nil {
		return err
	}
	answer, err := c.supervisor.Create(ctx, &api.CreateRequest{
		Id: c.ID, Bundle: c.owner.dir(c.ID), Runtime: handler.Runtime, LogPath: c.logFile(),
		Stdin: c.config.GetStdin(), StdinOnce: c.config.GetStdinOnce(), FifoDir: c.owner.options.Sandboxes.Dir(c.sandbox.ID),
	})
	startError := ""
	if err != nil {
		advice := startAdvice(c.plan.Spec, err.Error())
		if advice != "" {
			advice = "; " + advice
		}
		if !errdefs.IsFailedPrecondition(err) {
			return fmt.Errorf("%w%s", err, advice)
		}
		startError = errtext.Of(err) + advice
	}
	user, userErr := protojson.Marshal(oci.UserOf(c.plan.Spec))
	resources, err := protojson.Marshal(inForce(c.plan.Spec.Linux.Resources, *c.plan.Spec.Process.OOMScoreAdj))
	if err := errors.Join(userErr, err); err != nil {
		return err
	}
	return c.owner.write(c.Container, func(f *Facts) {
		f.BootID, f.Created, f.User, f.Resources, f.StartError = c.owner.bootID, true, user, resources, startError
		f.Process = process.Facts{PID: int(answer.GetPid()), StartTime: answer.GetStartTime()}
	})
}

// makeLogDirectory follows no symbolic link below the directory of all pods' logs.
func (c *creation) makeLogDirectory() error {
	if c.logFile() == "" { // LogPath is in the directory of the container, which may be removed by now
		return nil
	}
	base, path, guarded := strings.Cut(c.logFile(), api.PathGuard)
	if !guarded {
		return os.MkdirAll(filepath.Dir(c.LogPath), 0o755)
	}
	if err := os.MkdirAll(base, 0o755); err != nil {
		return err
	}
	dir, err := unix.Open(base, unix.O_PATH|unix.O_DIRECTORY|unix.O_CLOEXEC, 0)
	for name := range strings.SplitSeq(filepath.Dir(path), "/") {
		if err != nil {
			break
		}
		above := dir
		if err = unix.Mkdirat(above, name, 0o755); err == nil || errors.Is(err, unix.EEXIST) {
			dir, err = unix.Openat(above, name, unix.O_PATH|unix.O_DIRECTORY|unix.O_NOFOLLOW|unix.O_CLOEXEC, 0)
		}
		_ = unix.Close(above)
	}
	if err != nil {
		return fmt.Errorf("make the directory of the log %s, where no symbolic link is followed: %w", c.LogPath, err)
	}
	return unix.Close(dir)
}

// logFile returns the path of the log, or "" for none. It trusts only the directory of all pods' logs (/var/log/pods).
func (c *creation) logFile() string {
	directory := c.sandbox.Config().GetLogDirectory()
	if c.config.GetLogPath() == "" || directory == "" {
		return ""
	}
	base, pod := filepath.Split(filepath.Clean(directory))
	return api.GuardedPath(base, filepath.Join(pod, c.config.GetLogPath()))
}

// Start starts a created container, once. A container whose program cannot be executed is Exited (StartError).
func (s *Store) Start(ctx context.Context, id string) error {
	c, err := s.Find(id)
	if err != nil {
		return err
	}
	ctx, cancel := s.outlive(ctx)
	defer cancel()
	err = s.underLock(ctx, c, func() error {
		if state := c.State(); state != runtimeapi.ContainerState_CONTAINER_CREATED {
			return fmt.Errorf("it is %s, only a created one can be started: %w", stateText(state), errdefs.ErrFailedPrecondition)
		}
		if pod, err := s.options.Sandboxes.Find(c.SandboxID); err != nil || !pod.Ready() {
			return fmt.Errorf("its sandbox %s is not ready: %w", c.SandboxID, errdefs.ErrFailedPrecondition)
		}
		steps := s.begin(ctx, c)
		if s.hasPlugins() {
			steps.Step(stepNRIStart, func(ctx context.Context) error { return s.ask(ctx, c, Plugins.Start) })
		}
		// Plugins are notified of the start before the end, however short the life.
		if c.stopLock.Acquire(ctx, 1) != nil {
			return fmt.Errorf("wait for plugins that are notified of its end: %w", context.Cause(ctx))
		}
		defer c.stopLock.Release(1)
		steps.Step(stepStart, func(ctx context.Context) error { return s.start(ctx, c) })
		s.announce(steps, c, stepNRIStarted, Plugins.Started)
		return steps.Err()
	})
	if err != nil {
		return fmt.Errorf("container %s: %w", c.ID, err)
	}
	return nil
}

func (s *Store) start(ctx context.Context, c *Container) error {
	if reason := c.Facts().StartError; reason != "" {
		return s.noteStartError(ctx, c, fmt.Errorf("%s: %w", reason, errdefs.ErrFailedPrecondition))
	}
	supervisor, err := s.options.Supervisors.Ensure(ctx, c.Supervisor)
	if err != nil {
		return err
	}
	before := time.Now().UnixNano() // the container may have ended when the call returns
	if err := supervisor.Start(ctx, c.ID); err != nil {
		if spec, specErr := s.Spec(c); specErr == nil && errdefs.IsFailedPrecondition(err) {
			if advice := startAdvice(spec, err.Error()); advice != "" {
				err = fmt.Errorf("%s; %s: %w", errtext.Of(err), advice, errdefs.ErrFailedPrecondition)
			}
		}
		return s.noteStartError(ctx, c, err)
	}
	// The supervisor's event says the same, earlier or later.
	return s.write(c, func(f *Facts) {
		if f.StartedAt == 0 {
			f.StartedAt = before
		}
	})
}

// noteStartError ends a container whose program could not be executed, unless its supervisor is lost.
func (s *Store) noteStartError(ctx context.Context, c *Container, startErr error) error {
	if errdefs.IsUnavailable(startErr) || ctx.Err() != nil {
		return startErr
	}
	s.change(c, func(*Facts) { c.startFailed = errtext.Of(startErr) }) // its supervisor may tell of the end before send returns
	// Where it is not the program that failed, init still waits, or the program runs, and nobody else would end it.
	if err := s.send(ctx, c, uint32(unix.SIGKILL), true); err != nil && !errdefs.IsNotFound(err) {
		return errors.Join(startErr, fmt.Errorf("kill it: %w", err))
	}
	s.change(c, func(f *Facts) {
		c.takeExit(f, 0, true, false, 0)
		if f.Reason == reasonStartError { // another end that was reported first, such as a stop, does not change
			takeStartError(f, c.startFailed)
		}
	})
	return startErr
}
