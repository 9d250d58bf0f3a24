package sandbox

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/opencontainers/runtime-spec/specs-go"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/cgroup"
	"github.com/minicri/minicri/internal/id"
)

// proofRetry is the delay after which a pause that could not be made is tried again.
const proofRetry = 5 * time.Second

// programTrial bounds the trial of a handler's program, which takes some 100 ms: one that
// hangs must not run beside the pods for longer.
const programTrial = 5 * time.Second

// Prove begins to try whether a pause can be made. Call it once, when supervisors can
// be asked.
func (s *Store) Prove() {
	s.unproven.Store(&errUnproven)
	s.work.Go(s.prove)
	s.options.Handlers.ProveBy(s.proveHandler)
}

// proveHandler has the program of a handler make a pause, which is not started: that is
// what a container's start needs of it.
func (s *Store) proveHandler(program []string) error {
	if err := s.base.Err(); err != nil {
		return err
	}
	done := make(chan error, 1)
	s.work.Go(func() { done <- s.tryPause(programTrial, program) })
	if err := <-done; err != nil {
		return fmt.Errorf("a container on trial could not be made: %w", err)
	}
	return nil
}

// errUnproven is so until the first pause is made.
var errUnproven = errors.New("it is not known yet whether pods can be made: the first pause is being started")

// prove makes a pause on the network of the node, and removes it, until that succeeds:
// before it no pod can be made. What a daemon that is killed here leaves is an orphan,
// which the next one sweeps.
func (s *Store) prove() {
	for s.base.Err() == nil {
		err := s.tryPause(s.limits.Load().Run, nil)
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

// AwaitProof waits until the first pause has been tried, and each handler's program, no
// longer than the limit.
func (s *Store) AwaitProof(limit time.Duration) {
	ctx, cancel := context.WithTimeout(s.base, limit)
	defer cancel()
	select {
	case <-s.proof:
	case <-ctx.Done():
	}
	if s.options.Handlers != nil {
		s.options.Handlers.List(ctx)
	}
}

// tryPause goes the way of a pod on the network of the node, without a record; that of a
// program is made as a container is, with a network of its own, and not started.
func (s *Store) tryPause(limit time.Duration, program []string) (err error) {
	ctx, cancel := s.bound(s.base, limit)
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
	spec, err := c.spec()
	if err != nil {
		return err
	}
	if len(program) > 0 {
		// Runtimes make and need /dev/null, and runsc would take the addresses of the node's
		// own network.
		spec.Mounts = slices.DeleteFunc(spec.Mounts, func(m specs.Mount) bool { return m.Destination == "/dev" })
		spec.Mounts = append(spec.Mounts, specs.Mount{Destination: "/dev", Type: "tmpfs", Source: "tmpfs"})
		spec.Linux.Namespaces = append(spec.Linux.Namespaces, specs.LinuxNamespace{Type: specs.NetworkNamespace})
	}
	if c.starter, err = s.preparePause(ctx, c.Sandbox, spec, program); err != nil || len(program) > 0 {
		return err
	}
	c.pause, err = c.starter.start(ctx)
	return err
}
