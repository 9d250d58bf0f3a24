package sandbox

import (
	"context"
	"log/slog"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/redact"
	"github.com/minicri/minicri/internal/step"
)

// The names of the steps of a pod.
const (
	stepCheck          step.Name = "pod/check"
	stepReserve        step.Name = "pod/reserve"
	stepRecord         step.Name = "pod/record"
	stepSync           step.Name = "pod/sync"
	stepFiles          step.Name = "pod/files"
	stepUserns         step.Name = "pod/userns"
	stepNetns          step.Name = "pod/netns"
	stepLoopback       step.Name = "pod/loopback"
	stepPrepare        step.Name = "pod/prepare"
	stepAdd            step.Name = "pod/cni add"
	stepAddresses      step.Name = "pod/addresses"
	stepNRIRun         step.Name = "pod/nri run"
	stepStart          step.Name = "pod/start"
	stepNRIUpdate      step.Name = "pod/nri update"
	stepNRIUpdated     step.Name = "pod/nri updated"
	stepStopContainers step.Name = "pod/stop containers"
	stepNRIStop        step.Name = "pod/nri stop"
	stepEndPause       step.Name = "pod/end pause"
	stepDel            step.Name = "pod/cni del"
	stepRemoveNetns    step.Name = "pod/remove netns"
	stepRemoveUserns   step.Name = "pod/remove userns"
	stepUnmountFiles   step.Name = "pod/unmount files"
	stepRecordStopped  step.Name = "pod/record stopped"
	stepRemoveAll      step.Name = "pod/remove containers"
	stepNRIRemove      step.Name = "pod/nri remove"
	stepRemoveFiles    step.Name = "pod/remove files"
	stepRemoveRecord   step.Name = "pod/remove record"
)

// What a step may be for only (step.Step.Only).
const (
	// OwnNetwork is a pod that is not on the host network, OwnUsers one with a
	// user namespace.
	OwnNetwork = "own network"
	OwnUsers   = "user namespace"
	// WithNRI is a pod of a node with NRI.
	WithNRI = "NRI"
)

// Steps are those of a pod's life, by operation, in their order. An undo and a
// recovery do those of stop and remove from "end pause" on, but "record stopped".
func Steps() []step.Step {
	return []step.Step{
		{Name: stepCheck, Operation: "run"},
		{Name: stepReserve, Operation: "run"},
		{Name: stepRecord, Operation: "run"},
		{Name: stepSync, Operation: "run"}, // along with files to loopback
		{Name: stepFiles, Operation: "run"},
		{Name: stepUserns, Operation: "run", Only: OwnUsers},
		{Name: stepNetns, Operation: "run", Only: OwnNetwork},
		{Name: stepLoopback, Operation: "run", Only: OwnNetwork},
		{Name: stepPrepare, Operation: "run"}, // along with cni add
		{Name: stepAdd, Operation: "run", Only: OwnNetwork},
		{Name: stepAddresses, Operation: "run", Only: OwnNetwork},
		{Name: stepNRIRun, Operation: "run", Only: WithNRI},
		{Name: stepStart, Operation: "run"},

		{Name: stepNRIUpdate, Operation: "update", Only: WithNRI},
		{Name: stepNRIUpdated, Operation: "update", Only: WithNRI},

		{Name: stepStopContainers, Operation: "stop"},
		{Name: stepNRIStop, Operation: "stop", Only: WithNRI},
		{Name: stepEndPause, Operation: "stop"}, // along with cni del
		{Name: stepDel, Operation: "stop"},
		{Name: stepRemoveNetns, Operation: "stop"},
		{Name: stepRemoveUserns, Operation: "stop"},
		{Name: stepUnmountFiles, Operation: "stop"},
		{Name: stepRecordStopped, Operation: "stop"},

		{Name: stepRemoveAll, Operation: "remove"},
		{Name: stepNRIRemove, Operation: "remove", Only: WithNRI},
		{Name: stepRemoveFiles, Operation: "remove"},
		{Name: stepRemoveRecord, Operation: "remove"},
	}
}

// begin starts a sequence of steps on a sandbox, whose lock is held.
func (s *Store) begin(ctx context.Context, sb *Sandbox) *step.Sequence {
	return step.Begin(ctx, s.options.Observe, sb.timeline)
}

// Timeline is what was done to the sandbox until now, by this daemon and by
// those before.
func (sb *Sandbox) Timeline() []step.Row { return sb.timeline.Rows() }

// Stage is the step that is under way, nil if none is.
func (sb *Sandbox) Stage() *step.Row { return sb.timeline.Stage() }

// writeFacts writes the facts down, with the timeline until now.
func (s *Store) writeFacts(sb *Sandbox) error {
	facts := *sb.Facts()
	facts.Timeline = sb.Timeline()
	return s.facts.Write(sb.ID, facts)
}

// Names say which pod a line of the log is about, as pairs. The default handler has none.
func (sb *Sandbox) Names() []any {
	m := sb.config.GetMetadata()
	names := []any{"namespace", m.GetNamespace(), "pod", m.GetName(), "sandbox", sb.ID}
	if sb.RuntimeHandler != "" {
		names = append(names, "handler", sb.RuntimeHandler)
	}
	return names
}

// log names a sandbox in each line.
func (s *Store) log(sb *Sandbox) *slog.Logger { return s.options.Logger.With(sb.Names()...) }

// keepLife writes down the timeline of a sandbox that is gone, and of one that
// could not be made.
func (s *Store) keepLife(sb *Sandbox) {
	if err := s.options.Lives.Keep(sb.life()); err != nil {
		s.log(sb).Warn("the timeline of a pod is not kept", "err", err)
	}
}

// keepRefused writes down the timeline of a pod that was refused before it had
// an id.
func (s *Store) keepRefused(config *runtimeapi.PodSandboxConfig, timeline *step.Timeline, err error) {
	m := config.GetMetadata()
	if m.GetName() == "" {
		return
	}
	life := step.Life{
		Kind: "pod", ID: step.RefusedID("pod", nameOf(m)), Name: m.GetNamespace() + "/" + m.GetName(), Attempt: m.GetAttempt(),
		End: time.Now(), Error: err.Error(), Rows: timeline.Rows(),
	}
	if err := s.options.Lives.Keep(life); err != nil {
		s.options.Logger.Warn("the timeline of a pod is not kept", "pod", life.Name, "err", err)
	}
}

// NotePull adds the pull of an image to the timeline of the pod that it was for;
// one that failed is kept by itself when that pod is not there. The pod is nil
// for a pull that is for none.
func (s *Store) NotePull(pod *runtimeapi.PodSandboxConfig, row step.Row) {
	row.Kind = "image"
	if pod.GetMetadata() != nil {
		s.mu.RLock()
		sb := s.byName[nameOf(pod.GetMetadata())]
		s.mu.RUnlock()
		if sb != nil && s.base.Err() == nil {
			sb.timeline.Add(row)
			s.work.Go(func() { s.keepTimeline(sb) })
			return
		}
	}
	if row.Error == "" {
		return
	}
	life := step.Life{Kind: "image", ID: step.RefusedID("image", row.Step), Name: row.Step, End: time.Now(), Error: row.Error, Rows: []step.Row{row}}
	if err := s.options.Lives.Keep(life); err != nil {
		s.options.Logger.Warn("the timeline of a pull is not kept", "image", row.Step, "err", err)
	}
}

// keepTimeline writes the facts for the sake of the timeline alone: for the next
// daemon, and for minicri timeline when none runs.
func (s *Store) keepTimeline(sb *Sandbox) {
	unlock, err := sb.acquire(s.base)
	if err != nil {
		return
	}
	defer unlock()
	if !s.Exists(sb.ID) || sb.Facts().ReadyAt.IsZero() {
		return
	}
	if err := s.writeFacts(sb); err != nil {
		s.log(sb).Warn("the timeline of a pod is not on disk", "err", err)
	}
}

// life is the sandbox as step.Lives keeps it when it is gone, or has failed.
func (sb *Sandbox) life() step.Life {
	m := sb.config.GetMetadata()
	life := step.Life{Kind: "pod", ID: sb.ID, Name: m.GetNamespace() + "/" + m.GetName(), Attempt: m.GetAttempt(), End: time.Now(), Rows: sb.Timeline()}
	if sb.failure != nil {
		life.Error, life.Network = sb.failure.Error(), redact.JSON(sb.network)
	}
	return life
}
