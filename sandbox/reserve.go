package sandbox

import (
	"context"
	"fmt"
	"time"

	"github.com/containerd/errdefs"
	"google.golang.org/protobuf/proto"
	"google.golang.org/protobuf/reflect/protoreflect"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/id"
	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/internal/step/failpoint"
	"github.com/minicri/minicri/internal/validate"
)

// reserve gives the name to a new sandbox, or returns the one that has it; mine
// reports which. Two sandboxes never have one name, so a pod never has two
// namespaces.
func (s *Store) reserve(config *runtimeapi.PodSandboxConfig, handler string, timeline *step.Timeline) (sb *Sandbox, mine bool, err error) {
	record, err := newRecord(id.New(), config, handler)
	if err != nil {
		return nil, false, err
	}
	if handler == "" {
		record.DefaultHandler = s.options.Handlers.Default()
	}
	record.Supervisor = s.options.Group
	record.CgroupsPath = s.cgroupsPath(record.ID, config)
	sb = newSandbox(record, config)
	sb.timeline = timeline

	name := nameOf(config.GetMetadata())
	s.mu.Lock()
	defer s.mu.Unlock()
	if err := failpoint.Hit("lock pods"); err != nil {
		return nil, false, err
	}
	if other := s.byName[name]; other != nil {
		return other, false, nil
	}
	if err := s.room(sb); err != nil {
		return nil, false, err
	}
	// The clock may jump back; the kubelet takes the newest sandbox of a pod
	// for the one that counts.
	s.lastCreated = max(s.lastCreated+1, time.Now().UnixNano())
	sb.CreatedAt = s.lastCreated
	s.byName[name] = sb
	s.byID[sb.ID] = sb
	return sb, true, nil
}

// room refuses a sandbox that would make the list of all too long; mu is held.
func (s *Store) room(sb *Sandbox) error {
	used := 0
	for _, other := range s.byID {
		used += other.listSize
	}
	return validate.Listed("pod", len(s.byID), used, sb.listSize)
}

// listSize is what a sandbox takes in the list of all, without labels and annotations.
func listSize(record Record, config *runtimeapi.PodSandboxConfig) int {
	const framing = 8 // the item's own tag and length
	return framing + proto.Size(&runtimeapi.PodSandbox{
		Id: record.ID, Metadata: config.GetMetadata(), CreatedAt: time.Now().UnixNano(), State: runtimeapi.PodSandboxState_SANDBOX_NOTREADY,
		RuntimeHandler: record.RuntimeHandler,
	})
}

// wasAskedFor is nil if a request for the name of a sandbox asks for what that is, or is
// about to be: whoever asks for another runtime, or for other namespaces, must not
// take it for what it asked for.
func (sb *Sandbox) wasAskedFor(config *runtimeapi.PodSandboxConfig, handler string) error {
	what := ""
	if handler != sb.RuntimeHandler {
		what = fmt.Sprintf("runtime_handler: it has %q, and %q is asked for", sb.RuntimeHandler, handler)
	} else if field := difference(sb.config.ProtoReflect(), config.ProtoReflect(), "config"); field != "" {
		what = field + " differs"
	}
	if what == "" {
		return nil
	}
	return fmt.Errorf("sandbox %s already has this name and attempt, and is another one: %s: remove it, or ask with a higher attempt: %w", sb.ID, what, errdefs.ErrAlreadyExists)
}

// difference is the path of the first field in which two messages differ, "" if none.
func difference(a, b protoreflect.Message, path string) string {
	fields := a.Descriptor().Fields()
	for i := range fields.Len() {
		field := fields.Get(i)
		x, y, at := a.Get(field), b.Get(field), path+"."+string(field.Name())
		if x.Equal(y) && a.Has(field) == b.Has(field) {
			continue
		}
		if field.Message() == nil || field.IsList() || field.IsMap() {
			return at
		}
		if inside := difference(x.Message(), y.Message(), at); inside != "" {
			return inside
		}
	}
	return ""
}

// await waits until the Run that makes the sandbox has ended, no longer than
// the caller's context, and returns its outcome.
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
