package sandbox

import (
	"errors"
	"fmt"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/id"
)

// proofRetry is the delay after which a pause that could not be made is tried again.
const proofRetry = 5 * time.Second

// Prove begins to try whether a pause can be made. Call it once, when supervisors can
// be asked.
func (s *Store) Prove() {
	s.unproven.Store(&errUnproven)
	s.work.Go(s.prove)
}

// errUnproven is so until the first pause is made.
var errUnproven = errors.New("whether a pod can be made is being tried: a pause is started")

// prove makes a pause on the network of the node, and removes it, until that succeeds:
// before it no pod can be made. What a daemon that is killed here leaves is an orphan,
// which the next one sweeps.
func (s *Store) prove() {
	for s.base.Err() == nil {
		err := s.tryPause()
		if err == nil {
			s.unproven.Store(nil)
			s.tried.Do(func() { close(s.proof) })
			return
		}
		err = fmt.Errorf("no pod can be made: a pause did not start, and is tried again: %w", err)
		s.options.Logger.Error("the node is not ready", "err", err)
		s.unproven.Store(&err)
		s.tried.Do(func() { close(s.proof) })
		select {
		case <-s.base.Done():
		case <-time.After(proofRetry):
		}
	}
}

// Ready is nil if a pause could be made since the start of this daemon, or else says
// why not.
func (s *Store) Ready() error {
	if err := s.unproven.Load(); err != nil {
		return *err
	}
	return nil
}

// AwaitProof waits until the first pause has been tried, no longer than the limit.
func (s *Store) AwaitProof(limit time.Duration) {
	select {
	case <-s.proof:
	case <-time.After(limit):
	}
}

// tryPause goes the way of a pod on the network of the node, without a record.
func (s *Store) tryPause() (err error) {
	ctx, cancel := s.bound(s.base, s.limits.Load().Run)
	defer cancel()
	config := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "proof", Namespace: "minicri", Uid: "proof"},
		Linux: &runtimeapi.LinuxPodSandboxConfig{SecurityContext: &runtimeapi.LinuxSandboxSecurityContext{
			NamespaceOptions: &runtimeapi.NamespaceOption{Network: runtimeapi.NamespaceMode_NODE},
		}},
	}
	record, err := newRecord(id.New(), config, "")
	if err != nil {
		return err
	}
	record.Supervisor, record.CgroupsPath = s.options.Group, s.cgroupsPath(record.ID, config)
	c := &creation{Sandbox: newSandbox(record, config), owner: s}
	s.mu.Lock()
	s.byID[c.ID] = c.Sandbox
	s.mu.Unlock()
	defer func() {
		err = errors.Join(err, c.starter.abort(), s.killPause(c.Sandbox), s.removeProcesses(c.Sandbox), s.removeFiles(c.ID))
		s.mu.Lock()
		defer s.mu.Unlock()
		delete(s.byID, c.ID)
	}()
	if err := s.options.Node.Know(cgroup.Path(c.CgroupsPath)); err != nil {
		return err
	}
	if err := c.makeFiles(ctx); err != nil {
		return err
	}
	if err := c.preparePause(ctx); err != nil {
		return err
	}
	c.pause, err = c.starter.start(ctx)
	return err
}
