package sandbox

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/state"
)

// Stop ends everything that runs in the sandbox and takes its network back.
// Calling it again, or beside another call, or for an id that is unknown, is
// success. While CNI DEL fails it reports so, until the tries of the network's
// limits are used up; the network namespace stays until DEL has succeeded.
func (s *Store) Stop(ctx context.Context, id string) error {
	sb, err := s.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	release, err := sb.acquire(ctx)
	if err != nil {
		return err
	}
	defer release()
	if err := s.stop(s.outlive(ctx), sb); err != nil {
		return fmt.Errorf("stop sandbox %s: %w", sb.ID, err)
	}
	return nil
}

// outlive is the context of work that goes on when the caller is gone: half a
// stop helps nobody. It keeps the caller's values and none of its limits.
func (s *Store) outlive(ctx context.Context) context.Context { return context.WithoutCancel(ctx) }

// stop is Stop under the sandbox's lock.
func (s *Store) stop(ctx context.Context, sb *Sandbox) error {
	if !sb.Facts().StoppedAt.IsZero() {
		return nil
	}
	ctx, cancel := s.bound(ctx, s.options.Limits.Destroy)
	defer cancel()
	if s.containers != nil {
		err := s.around(ctx, "stop containers", func() error { return s.containers.StopPod(ctx, sb.ID) })
		if err != nil {
			return err
		}
	}
	if err := s.release(ctx, sb, keepNamespace); err != nil {
		return err
	}
	return s.recordStopped(sb)
}

func (s *Store) recordStopped(sb *Sandbox) error {
	return s.around(context.Background(), "record stopped", func() error {
		facts := sb.update(func(f *Facts) {
			f.BootID = s.bootID
			f.StoppedAt = time.Now()
		})
		return s.facts.Write(sb.ID, *facts)
	})
}

// Remove stops the sandbox if need be and removes all of it, the name last.
// Calling it again, or for an id that is unknown, is success.
func (s *Store) Remove(ctx context.Context, id string) error {
	sb, err := s.Find(id)
	if errdefs.IsNotFound(err) {
		return nil
	}
	if err != nil {
		return err
	}
	release, err := sb.acquire(ctx)
	if err != nil {
		return err
	}
	defer release()
	if !s.exists(sb.ID) { // another Remove was faster
		return nil
	}
	if err := s.remove(s.outlive(ctx), sb); err != nil {
		return fmt.Errorf("remove sandbox %s: %w", sb.ID, err)
	}
	return nil
}

// remove is Remove under the sandbox's lock.
func (s *Store) remove(ctx context.Context, sb *Sandbox) error {
	if err := s.stop(ctx, sb); err != nil {
		return err
	}
	if s.containers != nil {
		err := s.around(ctx, "remove containers", func() error { return s.containers.RemovePod(ctx, sb.ID) })
		if err != nil {
			return err
		}
	}
	return s.destroy(ctx, sb, keepNamespace)
}

// onFailedDetach says what becomes of the namespace when DEL fails.
type onFailedDetach bool

const (
	// keepNamespace, and fail: somebody will ask again, and DEL wants it.
	keepNamespace onFailedDetach = false
	// leaveToJournal: nobody will ask again; the network's journal goes on,
	// and keeps the namespace.
	leaveToJournal onFailedDetach = true
)

// destroy is the only undo. It takes back every part that a sandbox may have,
// whichever of them exist, and goes on where one fails. The record goes last
// and only when nothing else is left, so destroy can be called again, by a
// daemon that comes later too. The sandbox's lock is held.
func (s *Store) destroy(ctx context.Context, sb *Sandbox, policy onFailedDetach) error {
	err := errors.Join(
		s.release(ctx, sb, policy),
		s.around(ctx, "remove files", func() error { return s.removeFiles(sb.ID) }),
	)
	if err == nil {
		err = s.around(ctx, "remove record", func() error {
			return errors.Join(s.facts.Remove(sb.ID), s.records.Remove(sb.ID))
		})
	}
	if err == nil {
		s.forget(sb)
		s.tell(sb, runtimeapi.ContainerEventType_CONTAINER_DELETED_EVENT)
	}
	return err
}

// release takes back what the kernel and the network hold for the sandbox:
// pause, attachment, namespaces. Pause gets its SIGKILL first; while it goes,
// and its cgroups with it, DEL runs.
func (s *Store) release(ctx context.Context, sb *Sandbox, policy onFailedDetach) error {
	gone := s.endPause(ctx, sb)
	detached := s.around(ctx, "cni del", func() error { return s.detach(ctx, sb, policy) })
	err := errors.Join(<-gone, detached)
	if detached == nil {
		err = errors.Join(err, s.around(ctx, "remove netns", func() error { return s.removeNetns(sb.ID) }))
	}
	return errors.Join(err, s.around(ctx, "remove userns", func() error { return s.options.Userns.Remove(sb.ID) }))
}

// removeNetns leaves the namespace to the network's journal if that still has
// to run DEL, which wants it.
func (s *Store) removeNetns(id string) error {
	if s.options.Networks.Attached(id) {
		return nil
	}
	return s.options.Netns.Remove(id)
}

// endPause kills pause at once and sees to the rest beside the caller. From
// here on the sandbox is not Ready, whatever becomes of the rest.
func (s *Store) endPause(ctx context.Context, sb *Sandbox) (gone <-chan error) {
	done := make(chan error, 1)
	if sb.Ready() {
		sb.update(func(f *Facts) { f.ExitedAt = time.Now() })
		s.tell(sb, runtimeapi.ContainerEventType_CONTAINER_STOPPED_EVENT)
	}
	go func() {
		done <- s.around(ctx, "end pause", func() error {
			return errors.Join(s.killPause(sb), s.removeProcesses(sb.ID, sb.CgroupsPath))
		})
	}()
	return done
}

// killPause is called under the sandbox's lock: whoever holds it waits.
func (s *Store) killPause(sb *Sandbox) error {
	if sb.pause == nil {
		return nil
	}
	err := errors.Join(sb.pause.Kill(s.options.Limits.Kill), sb.pause.Close())
	sb.pause = nil
	return err
}

// removeProcesses ends whatever is left of a pause process, prepared or
// running: all that runs in its cgroup, the cgroup, and the runtime's state.
func (s *Store) removeProcesses(id, cgroupsPath string) error {
	return errors.Join(
		s.options.Hierarchies.Remove(cgroup.Path(cgroupsPath), s.options.Limits.Kill),
		state.RemoveAll(filepath.Join(s.runtimeRoot(), id)),
	)
}

func (s *Store) detach(ctx context.Context, sb *Sandbox, policy onFailedDetach) error {
	networks := s.options.Networks
	err := networks.Detach(ctx, sb.ID, networks.NamespacePath(sb.ID))
	if err != nil && policy == leaveToJournal {
		s.options.Logger.Warn("a sandbox goes before its attachment, which is released in the background", "sandbox", sb.ID, "err", err)
		networks.Release(sb.ID)
		return nil
	}
	return err
}
