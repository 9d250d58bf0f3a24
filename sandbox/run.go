package sandbox

import (
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/validate"
	"github.com/minicri/minicri/namespace"
	"github.com/minicri/minicri/network"
	"github.com/minicri/minicri/oci"
)

// Run makes the sandbox of a pod and returns its id. A second call for the
// same pod and attempt waits for the first and gets the same id. The context
// limits the waiting, not the work.
func (s *Store) Run(ctx context.Context, config *runtimeapi.PodSandboxConfig, handler string) (string, error) {
	if err := s.around(ctx, "check", func() error { return validate.Pod(config, handler, s.node()) }); err != nil {
		return "", err
	}
	sb, mine, err := s.reserve(config, handler)
	if err != nil {
		return "", err
	}
	if mine {
		s.work.Go(func() { s.create(context.WithoutCancel(ctx), sb) })
	}
	return sb.await(ctx)
}

// create is Run after the name is reserved.
func (s *Store) create(ctx context.Context, sb *Sandbox) {
	defer close(sb.built)
	sb.lock <- struct{}{}
	defer func() { <-sb.lock }()

	ctx, cancel := s.bound(ctx, s.options.Limits.Run)
	defer cancel()
	c := &creation{Sandbox: sb, owner: s, ctx: ctx}
	c.run()
	if c.err == nil {
		sb.listed.Store(true)
		s.tell(sb, runtimeapi.ContainerEventType_CONTAINER_CREATED_EVENT)
		s.tell(sb, runtimeapi.ContainerEventType_CONTAINER_STARTED_EVENT)
		s.watch(sb)
		s.letGo(c)
		return
	}
	sb.runErr = s.undo(c)
}

// bound gives a context that ends with the daemon and after the limit.
func (s *Store) bound(ctx context.Context, limit time.Duration) (context.Context, func()) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop := context.AfterFunc(s.base, func() { cancel(context.Cause(s.base)) })
	ctx, release := context.WithTimeoutCause(ctx, limit, fmt.Errorf("not done within %v: %w", limit, context.DeadlineExceeded))
	return ctx, func() {
		release()
		stop()
		cancel(nil)
	}
}

// run goes through the steps 3 to 11.
func (c *creation) run() {
	c.owner.work.Go(cgroup.WarmLock)
	c.step("record", c.writeRecord)
	synced := c.beside("sync", c.syncRecord)
	c.step("files", c.makeFiles)
	if oci.UserNamespace(c.config) != nil {
		c.step("userns", c.makeUserns)
	}
	if c.hostNetwork() {
		c.step("prepare", c.preparePause)
		c.join(synced)
		c.step("start", c.startPause)
		return
	}
	c.step("netns", c.makeNetns)
	c.step("loopback", c.loopbackUp)
	if needsInterfaces(c.config) {
		c.join(synced)
		c.step("cni add", c.attach)
		c.step("addresses", c.checkAddresses)
		c.step("prepare", c.preparePause)
	} else {
		prepared := c.beside("prepare", c.preparePause)
		c.join(synced)
		c.step("cni add", c.attach)
		c.step("addresses", c.checkAddresses)
		c.join(prepared)
	}
	c.step("start", c.startPause)
}

// undo destroys what a failed Run made. The attachment, if its DEL fails too,
// goes on by itself in the network's journal; anything else that could not be
// taken back keeps the sandbox, listed as NotReady, for Stop and Remove.
func (s *Store) undo(c *creation) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(c.ctx), s.options.Limits.Destroy)
	defer cancel()
	undoErr := errors.Join(c.starter.abort(), c.holder.end(), s.destroy(ctx, c.Sandbox, leaveToJournal))
	err := fmt.Errorf("run sandbox %s: %w", c.ID, c.err)
	if undoErr == nil {
		return err
	}
	s.options.Logger.Error("a sandbox that failed could not be taken back: stop and remove it", "sandbox", c.ID, "err", undoErr)
	c.listed.Store(true)
	return errors.Join(err, fmt.Errorf("take sandbox %s back: %w", c.ID, undoErr))
}

// writeRecord makes the sandbox known to a daemon that comes after a crash,
// and chooses the network configuration for the whole life of the pod.
func (c *creation) writeRecord() error {
	if err := c.owner.records.Put(c.ID, c.Record); err != nil {
		return err
	}
	return c.journal()
}

// syncRecord makes record and attachment durable, side by side: each waits for
// the disk. What is made meanwhile does not survive a power cut; what ADD
// makes may, so ADD waits.
func (c *creation) syncRecord() error {
	synced := make(chan error, 1)
	go func() { synced <- c.owner.options.Networks.SyncJournal(c.ID) }()
	return errors.Join(c.owner.records.Sync(c.ID), <-synced)
}

func (c *creation) journal() error {
	if c.hostNetwork() {
		return nil
	}
	configuration, err := c.owner.options.Networks.Configuration()
	if err != nil {
		return fmt.Errorf("%w: %w", err, errdefs.ErrUnavailable)
	}
	attachment, err := newAttachment(c.Sandbox, configuration)
	if err != nil {
		return err
	}
	return c.owner.options.Networks.Journal(attachment)
}

func (c *creation) makeNetns() error {
	if c.holder.running() {
		return errors.Join(c.holder.Pin(c.owner.options.Netns, c.ID, "net"), c.holder.end())
	}
	return c.owner.options.Netns.Create(c.ID)
}

func (c *creation) loopbackUp() error {
	return namespace.LoopbackUp(c.owner.options.Netns.Path(c.ID))
}

func (c *creation) attach() error {
	result, err := c.owner.options.Networks.Attach(c.ctx, c.ID, c.owner.options.Netns.Path(c.ID))
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

func (c *creation) checkAddresses() error {
	if len(c.Addresses()) == 0 {
		return network.ErrNoAddress
	}
	return nil
}

func (c *creation) preparePause() error {
	spec, err := c.spec()
	if err != nil {
		return err
	}
	c.starter, err = c.owner.preparePause(c.ctx, c.ID, spec)
	return err
}

// startPause releases pause and makes the sandbox Ready: the facts are written
// first, so that a Ready sandbox is Ready for a daemon that comes after, too.
func (c *creation) startPause() error {
	pause, err := c.starter.release()
	if err != nil {
		return err
	}
	c.pause = pause
	facts := c.update(func(f *Facts) {
		f.BootID = c.owner.bootID
		f.Pause = pause.Facts
		f.Timeline = append(c.timeline, c.underWay())
		f.ReadyAt = time.Now()
	})
	return c.owner.facts.Write(c.ID, *facts)
}

// letGo waits for the end of the shim: pause runs, and that the shim is on its
// way out need not hold up anybody.
func (s *Store) letGo(c *creation) {
	s.work.Go(func() {
		if err := c.starter.abort(); err != nil {
			s.options.Logger.Warn("the shim that started pause", "sandbox", c.ID, "err", err)
		}
	})
}
