package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/id"
	"github.com/minicri/minicri/internal/step"
)

// reserve gives the name to a new sandbox, or finds the one that has it; mine
// tells which. Two sandboxes never have one name, so a pod never has two
// namespaces.
func (s *Store) reserve(config *runtimeapi.PodSandboxConfig, handler string, timeline *step.Timeline) (sb *Sandbox, mine bool, err error) {
	record, err := newRecord(id.New(), config, handler)
	if err != nil {
		return nil, false, err
	}
	record.Supervisor = s.options.Group(handler, record.ID)
	record.CgroupsPath = s.cgroupsPath(record.ID, config)
	sb = newSandbox(record, config)
	sb.timeline = timeline

	name := nameOf(config.GetMetadata())
	s.mu.Lock()
	defer s.mu.Unlock()
	if other := s.byName[name]; other != nil {
		return other, false, nil
	}
	// The clock may jump back; the kubelet takes the newest sandbox of a pod
	// for the one that counts.
	s.lastCreated = max(s.lastCreated+1, time.Now().UnixNano())
	sb.CreatedAt = s.lastCreated
	s.byName[name] = sb
	s.byID[sb.ID] = sb
	return sb, true, nil
}

// await waits until the Run that makes the sandbox has ended, no longer than
// the caller's context, and tells what came of it.
func (sb *Sandbox) await(ctx context.Context) (string, error) {
	select {
	case <-sb.built:
	case <-ctx.Done():
		return "", fmt.Errorf("sandbox %s is still being made, ask again for the same pod to wait for it: %w", sb.ID, context.Cause(ctx))
	}
	if sb.runErr != nil {
		return "", sb.runErr
	}
	if !sb.Ready() {
		return "", fmt.Errorf("sandbox %s of this name and attempt is not ready: remove it, or ask with a higher attempt: %w", sb.ID, errdefs.ErrAlreadyExists)
	}
	return sb.ID, nil
}
