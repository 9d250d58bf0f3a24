package sandbox

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
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/oci"
)

// Run makes the sandbox of a pod and returns its id. A second call for the
// same pod and attempt that asks for the same waits for the first and gets the same id. The context
// limits the waiting, not the work.
func (s *Store) Run(ctx context.Context, config *runtimeapi.PodSandboxConfig, handler string) (string, error) {
	timeline := step.NewTimeline(nil)
	steps := step.Begin(ctx, s.options.Observe, timeline)
	var sb *Sandbox
	var mine bool
	steps.Step(stepCheck, func(ctx context.Context) error { return s.check(ctx, config, handler) })
	steps.Step(stepReserve, func(context.Context) (err error) {
		sb, mine, err = s.reserve(config, handler, timeline)
		return err
	})
	if err := steps.Err(); err != nil {
		if mine { // the step failed after it
			sb.runErr = err
			close(sb.built)
			s.forget(sb)
		}
		s.keepRefused(config, timeline, err)
		return "", err
	}
	if mine {
		s.work.Go(func() { s.create(ctx, sb) })
	} else if err := sb.wasAskedFor(config, handler); err != nil {
		return "", err
	}
	return sb.await(ctx)
}

// check refuses what cannot work, before anything has been made.
func (s *Store) check(ctx context.Context, config *runtimeapi.PodSandboxConfig, handler string) error {
	if err := validate.Pod(config, handler, s.node()); err != nil {
		return err
	}
	found, err := s.options.Handlers.Find(ctx, handler)
	if err != nil {
		return err
	}
	if oci.UserNamespace(config) != nil && !found.Features.UserNamespaces {
		return fmt.Errorf("config.linux.security_context.namespace_options.userns_options: "+
			"the runtime of handler %q cannot map the owners of mounts: %w", handler, errdefs.ErrInvalidArgument)
	}
	return nil
}

// create is Run after the name is reserved.
func (s *Store) create(ctx context.Context, sb *Sandbox) {
	defer close(sb.built)
	ctx, cancel := s.bound(ctx, s.limits.Load().Run)
	defer cancel()
	if sb.runErr = sb.lock.Lock(ctx); sb.runErr != nil {
		return
	}
	defer sb.lock.Unlock()

	c := &creation{Sandbox: sb, owner: s, steps: s.begin(ctx, sb)}
	c.run()
	if c.steps.Err() == nil {
		sb.listed.Store(true)
		s.emit(sb, runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT)
		s.emit(sb, runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
		s.watch(sb)
		return
	}
	sb.runErr = s.undo(ctx, c)
}

// bound is the context of work that ends with the daemon and after the limit,
// and not with its caller.
func (s *Store) bound(ctx context.Context, limit time.Duration) (context.Context, context.CancelFunc) {
	return step.Bound(ctx, s.base, limit)
}

// creation is one way through the steps of Run.
type creation struct {
	*Sandbox
	owner   *Store
	steps   *step.Sequence
	starter *pauseStarter
	labels  oci.SELinux
	// holder is the process that holds a new user namespace, nil if there is none.
	holder *namespace.Holder
}

// run goes through the steps from record to start.
func (c *creation) run() {
	steps := c.steps
	steps.Step(stepRecord, c.writeRecord)
	synced := steps.Async(stepSync, c.syncRecord)
	steps.Step(stepFiles, c.makeFiles)
	if oci.UserNamespace(c.config) != nil {
		steps.Step(stepUserns, c.makeUserns)
	}
	if c.hostNetwork() {
		steps.Step(stepPrepare, c.preparePause)
		steps.Join(synced)
		c.start()
		return
	}
	steps.Step(stepNetns, c.makeNetns)
	steps.Step(stepLoopback, c.loopbackUp)
	if needsInterfaces(c.config.GetLinux().GetSysctls()) || needsInterfaces(c.owner.options.Defaults.Sysctls) {
		steps.Join(synced)
		steps.Step(stepAdd, c.attach)
		steps.Step(stepAddresses, c.checkAddresses)
		steps.Step(stepPrepare, c.preparePause)
	} else {
		prepared := steps.Async(stepPrepare, c.preparePause)
		steps.Join(synced)
		steps.Step(stepAdd, c.attach)
		steps.Step(stepAddresses, c.checkAddresses)
		steps.Join(prepared)
	}
	c.start()
}

// start goes through the steps that follow when pause is prepared and the
// addresses are known.
func (c *creation) start() {
	// From here on plugins know of the pod, those that come later too, and are
	// notified of its end.
	c.announced = c.steps.Err() == nil
	if c.owner.hasPlugins() {
		c.steps.Step(stepNRIRun, c.announce)
	}
	c.steps.Step(stepStart, c.startPause)
}

// undo destroys what a failed Run made. If the DEL of the attachment fails too,
// the network's journal retries it in the background; if anything else could not
// be removed, the sandbox is listed as NotReady, for Stop and Remove.
func (s *Store) undo(ctx context.Context, c *creation) error {
	// Also when the daemon ends: it waits for this.
	ctx, cancel := step.Bound(ctx, context.Background(), s.limits.Load().Destroy)
	defer cancel()
	c.failure = c.steps.Err()
	if s.labels(c.ID).Process == "" { // pause was not prepared: destroy does not know the level
		s.options.Machine.ReleaseLevel(c.labels.Process)
	}
	undoErr := errors.Join(c.starter.abort(), c.holder.End(), s.destroy(ctx, c.Sandbox, leaveToJournal))
	err := fmt.Errorf("run sandbox %s: %w", c.ID, c.failure)
	if undoErr == nil {
		return err
	}
	s.log(c.Sandbox).Error("a sandbox that failed could not be rolled back: stop and remove it", "err", undoErr)
	c.listed.Store(true)
	return errors.Join(err, fmt.Errorf("roll back sandbox %s: %w", c.ID, undoErr))
}

// writeRecord makes the sandbox known to a daemon that comes after a crash,
// and chooses the network configuration for the whole life of the pod.
func (c *creation) writeRecord(context.Context) error {
	if err := c.owner.options.Node.Know(cgroup.Path(c.CgroupsPath)); err != nil {
		return err
	}
	if err := c.owner.records.Put(c.ID, c.Record); err != nil {
		return err
	}
	return c.journal()
}

// syncRecord makes record and attachment durable, side by side: each waits for
// the disk. What is made at the same time does not survive a power cut; what ADD
// makes may, so ADD waits.
func (c *creation) syncRecord(context.Context) error {
	synced := make(chan error, 1)
	go func() { synced <- c.owner.options.Networks.SyncJournal(c.ID) }()
	return errors.Join(c.owner.records.Sync(c.ID), <-synced)
}

func (c *creation) journal() error {
	if c.hostNetwork() {
		return nil
	}
	directory := c.owner.options.Networks.In(c.owner.options.Handlers.CNIConf(c.Handler()))
	configuration, err := directory.Configuration()
	if err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	c.network = configuration.Bytes
	attachment, err := newAttachment(c.Sandbox, configuration)
	if err != nil {
		return err
	}
	return c.owner.options.Networks.Journal(attachment)
}

func (c *creation) makeNetns(context.Context) error {
	if c.holder != nil {
		return errors.Join(c.holder.Pin(c.owner.options.Netns, c.ID, "net"), c.holder.End())
	}
	return c.owner.options.Netns.Create(c.ID)
}

func (c *creation) loopbackUp(context.Context) error {
	return namespace.LoopbackUp(c.owner.options.Netns.Path(c.ID))
}

func (c *creation) attach(ctx context.Context) error {
	result, err := c.owner.options.Networks.Attach(ctx, c.ID, c.owner.options.Netns.Path(c.ID))
	if err != nil {
		return err
	}
	raw, err := json.Marshal(result.Raw)
	if err != nil {
		return err
	}
	c.update(func(f *Facts) { f.Addresses, f.CNIResult = result.Addresses, raw })
	return nil
}

func (c *creation) checkAddresses(context.Context) error {
	if len(c.Addresses()) == 0 {
		return network.ErrNoAddress
	}
	return nil
}

// preparePause has pause started up to the exec barrier.
func (c *creation) preparePause(ctx context.Context) error {
	if c.RuntimeHandler != "" {
		if _, err := c.owner.options.Handlers.Find(ctx, c.RuntimeHandler); err != nil {
			return err
		}
	}
	spec, err := c.spec()
	if err != nil {
		return err
	}
	c.starter, err = c.owner.preparePause(ctx, c.Sandbox, spec, nil)
	return err
}

// startPause starts pause and makes the sandbox Ready: the facts are written
// first, so that a Ready sandbox is Ready for a daemon that comes after, too.
func (c *creation) startPause(ctx context.Context) error {
	pause, err := c.starter.start(ctx)
	if err != nil {
		return err
	}
	c.pause = pause
	c.update(func(f *Facts) {
		f.BootID = c.owner.bootID
		f.Pause = pause.Facts
		f.ReadyAt = time.Now()
	})
	return c.owner.writeFacts(c.Sandbox)
}

// makeUserns makes the pod's user namespace and, by the same clone(2), the
// network namespace that it owns; the step netns pins that one.
func (c *creation) makeUserns(context.Context) error {
	userns := oci.UserNamespace(c.config)
	held, err := namespace.StartHolder(c.owner.pauseProgram(), idMappings(userns.GetUids()), idMappings(userns.GetGids()))
	if err != nil {
		return err
	}
	c.holder = held
	err = held.Pin(c.owner.options.Userns, c.ID, "user")
	if err == nil && !c.hostNetwork() {
		return nil
	}
	return errors.Join(err, c.holder.End())
}

func idMappings(from []*runtimeapi.IDMapping) []namespace.IDMapping {
	var to []namespace.IDMapping
	for _, m := range from {
		to = append(to, namespace.IDMapping{ContainerID: m.GetContainerId(), HostID: m.GetHostId(), Length: m.GetLength()})
	}
	return to
}

// makeLabels makes the SELinux labels of the pod. Its level is its own until Stop or
// undo gives it back.
func (c *creation) makeLabels() (err error) {
	c.labels.Process, c.labels.Mount, err = c.owner.options.Machine.NewLabels(oci.SandboxSELinux(c.config))
	return err
}

// SELinux are the labels of the sandbox's pause process, which its containers
// share the level of; none on a machine without SELinux.
func (s *Store) SELinux(sb *Sandbox) oci.SELinux { return s.labels(sb.ID) }

// labels are read from the spec of pause: what it was started with.
func (s *Store) labels(id string) oci.SELinux {
	if !s.options.Machine.SELinux {
		return oci.SELinux{}
	}
	data, err := os.ReadFile(filepath.Join(s.Dir(id), "config.json"))
	if err != nil {
		return oci.SELinux{} // pause was never prepared, or its files are gone
	}
	spec := &specs.Spec{}
	if json.Unmarshal(data, spec) != nil || spec.Process == nil || spec.Linux == nil {
		return oci.SELinux{}
	}
	return oci.SELinux{Process: spec.Process.SelinuxLabel, Mount: spec.Linux.MountLabel}
}

// reserveLevels keeps the levels of the pods that an earlier daemon made.
func (s *Store) reserveLevels() {
	for id := range s.byID {
		s.options.Machine.ReserveLevel(s.labels(id).Process)
	}
}
