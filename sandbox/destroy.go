package sandbox

import (
	"context"
	"errors"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/step"
)

// Stop ends everything in the sandbox and tears down its network. It may be repeated, in parallel too; an unknown id
// is no error. It fails while CNI DEL does, until the retries are used up, and keeps the network namespace.
func (s *Store) Stop(ctx context.Context, id string) error { return s.end(ctx, id, "stop", s.stop) }

// Remove stops a running sandbox and removes all of it, the name last. An unknown id is no error.
func (s *Store) Remove(ctx context.Context, id string) error {
	return s.end(ctx, id, "remove", s.remove)
}

// end calls do under the lock of the sandbox, if there is one. do goes on when the caller goes away.
func (s *Store) end(ctx context.Context, id, name string, do func(context.Context, *Sandbox) error) error {
	sb, err := s.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	unlock, err := sb.Acquire(ctx)
	if err != nil {
		return err
	}
	defer unlock()
	if !s.Exists(sb.ID) { // another Remove was faster
		return nil
	}
	work, cancel := step.Bound(ctx, s.Base, s.Limits().Destroy)
	defer cancel()
	if err := do(work, sb); err != nil {
		return fmt.Errorf("%s sandbox %s: %w", name, sb.ID, err)
	}
	return nil
}

func (s *Store) stop(ctx context.Context, sb *Sandbox) error {
	if !sb.Facts().StoppedAt.IsZero() {
		return nil
	}
	if err := s.options.Supervisors.Known(sb.Supervisor); err != nil {
		return err
	}
	steps := s.begin(ctx, sb)
	steps.Step(stepStopContainers, func(ctx context.Context) error { return s.containers.StopPod(ctx, sb.ID) })
	if steps.Err() != nil {
		return steps.Err()
	}
	if err := s.teardown(steps, sb, keepNamespace); err != nil {
		return errors.Join(err, s.writeFacts(sb)) // a later daemon must know that Stop ended pause
	}
	// Written even after the limit, so that nothing is repeated.
	return s.begin(context.WithoutCancel(ctx), sb).Do(stepRecordStopped, func(context.Context) error {
		sb.Update(func(f *Facts) { f.BootID, f.StoppedAt = s.bootID, time.Now() })
		return s.writeFacts(sb)
	})
}

func (s *Store) remove(ctx context.Context, sb *Sandbox) error {
	if err := s.stop(ctx, sb); err != nil {
		return err
	}
	err := s.begin(ctx, sb).Do(stepRemoveAll, func(ctx context.Context) error { return s.containers.RemovePod(ctx, sb.ID) })
	if err != nil {
		return err
	}
	return s.destroy(ctx, sb, keepNamespace)
}

// What happens when DEL fails.
const (
	keepNamespace  = false // fail: the caller retries, and DEL needs the namespace
	leaveToJournal = true  // the network's journal retries, and keeps the namespace
)

// destroy is the only undo. It tries every part, and removes the record only when nothing else is left,
// so that it can be called again, even by a later daemon. The caller holds the sandbox's lock.
func (s *Store) destroy(ctx context.Context, sb *Sandbox, leave bool) error {
	steps := s.begin(ctx, sb)
	tornDown := s.teardown(steps, sb, leave)
	if sb.announced {
		sb.announced = false
		s.notify(steps, sb, stepNRIRemove, Plugins.RemovePod)
	}
	err := errors.Join(tornDown, steps.Do(stepRemoveFiles, func(context.Context) error { return s.removeFiles(sb.ID) }))
	if err == nil {
		err = steps.Do(stepRemoveRecord, func(context.Context) error {
			return errors.Join(s.files.Facts.Remove(sb.ID), s.files.Records.Remove(sb.ID))
		})
	}
	if err == nil {
		s.Forget(sb)
		// A supervisor that started meanwhile may have adopted pause.
		if err := s.deletePause(sb); err != nil {
			s.log(sb).Warn("the supervisor may still hold the pause of a removed sandbox", "err", err)
		}
		s.emit(sb, runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT)
		s.keepLife(sb)
	}
	return err
}

// teardown removes pause, attachment and namespaces. DEL runs while pause and its cgroups go.
func (s *Store) teardown(steps *step.Sequence, sb *Sandbox, leave bool) error {
	s.noteEnd(sb)
	if sb.announced && !sb.stopAnnounced {
		sb.stopAnnounced = true
		s.notify(steps, sb, stepNRIStop, Plugins.StopPod)
	}
	ended := steps.Async(stepEndPause, func(ctx context.Context) error {
		return errors.Join(s.killPause(sb), s.removeProcesses(sb), s.options.Supervisors.End(ctx, sb.Supervisor))
	})
	detached := steps.Do(stepDel, func(ctx context.Context) error { return s.detach(ctx, sb, leave) })
	err := errors.Join(ended.Wait(), detached)
	// If the journal still has to run DEL, the namespace stays.
	if detached == nil && !s.options.Networks.Attached(sb.ID) {
		err = errors.Join(err, steps.Do(stepRemoveNetns, func(context.Context) error { return s.options.Netns.Remove(sb.ID) }))
	}
	return errors.Join(
		err,
		steps.Do(stepRemoveUserns, func(context.Context) error { return s.options.Userns.Remove(sb.ID) }),
		steps.Do(stepUnmountFiles, func(context.Context) error { return s.unmountFiles(sb.ID) }),
	)
}

// noteEnd makes the sandbox NotReady before anything of it is removed.
func (s *Store) noteEnd(sb *Sandbox) {
	if sb.Ready() {
		sb.Update(func(f *Facts) { f.ExitedAt = time.Now() })
		s.emit(sb, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
	}
}

// killPause kills pause and waits for its end, under the sandbox's lock.
func (s *Store) killPause(sb *Sandbox) error {
	if sb.pause == nil {
		return nil
	}
	err := errors.Join(sb.pause.Kill(s.Limits().Kill), sb.pause.Close())
	sb.pause = nil
	return err
}

// removeProcesses ends what runs in pause's cgroup, and removes the cgroup and the supervisor's state of pause.
func (s *Store) removeProcesses(sb *Sandbox) error {
	return errors.Join(s.deletePause(sb), s.options.Hierarchies.Remove(cgroup.Path(sb.CgroupsPath), s.Limits().Kill))
}

func (s *Store) detach(ctx context.Context, sb *Sandbox, leave bool) error {
	networks := s.options.Networks
	err := networks.Detach(ctx, sb.ID, networks.NamespacePath(sb.ID))
	if err != nil && leave {
		s.log(sb).Warn("a sandbox is removed before its attachment: CNI DEL is retried in the background", "err", err)
		networks.Release(sb.ID)
		return nil
	}
	return err
}
