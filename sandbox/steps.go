package sandbox

import (
	"context"
	"log/slog"
	"slices"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/object"
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
	OwnNetwork = "own network"    // a pod that is not on the host network
	OwnUsers   = "user namespace" // a pod with one
)

// Steps returns the steps of a pod's life, by operation, in order. "sync" overlaps those from "files"
// to "loopback", "prepare" overlaps "cni add", and "end pause" overlaps "cni del". Undo and recovery do
// those of stop and remove from "end pause" on, without "record stopped".
func Steps() []step.Step {
	steps := slices.Concat(
		object.Steps("run", stepCheck, stepReserve, stepRecord, stepSync, stepFiles, stepUserns, stepNetns, stepLoopback, stepPrepare, stepAdd, stepAddresses, stepNRIRun, stepStart),
		object.Steps("update", stepNRIUpdate, stepNRIUpdated),
		object.Steps("stop", stepStopContainers, stepNRIStop, stepEndPause, stepDel, stepRemoveNetns, stepRemoveUserns, stepUnmountFiles, stepRecordStopped),
		object.Steps("remove", stepRemoveAll, stepNRIRemove, stepRemoveFiles, stepRemoveRecord),
	)
	for i, one := range steps {
		switch one.Name {
		case stepUserns:
			steps[i].Only = OwnUsers
		case stepNetns, stepLoopback, stepAdd, stepAddresses:
			steps[i].Only = OwnNetwork
		}
	}
	return steps
}

func (s *Store) begin(ctx context.Context, sb *Sandbox) *step.Sequence {
	return step.Begin(ctx, s.options.Observe, sb.Rows)
}

// writeFacts writes the facts, with the timeline.
func (s *Store) writeFacts(sb *Sandbox) error {
	facts := *sb.Facts()
	facts.Timeline = sb.Timeline()
	return s.files.Facts.Write(sb.ID, facts)
}

// Names identify the pod in a line of the log, as pairs. The default handler is left out.
func (sb *Sandbox) Names() []any {
	m := sb.config.GetMetadata()
	names := []any{"namespace", m.GetNamespace(), "pod", m.GetName(), "sandbox", sb.ID}
	if sb.RuntimeHandler != "" {
		names = append(names, "handler", sb.RuntimeHandler)
	}
	return names
}

func (s *Store) log(sb *Sandbox) *slog.Logger { return s.options.Logger.With(sb.Names()...) }

// life is a pod for step.Lives.
func life(id string, m *runtimeapi.PodSandboxMetadata, err error, rows []step.Row) step.Life {
	one := step.Life{Kind: "pod", ID: id, Name: m.GetNamespace() + "/" + m.GetName(), Attempt: m.GetAttempt(), End: time.Now(), Rows: rows}
	if err != nil {
		one.Error = err.Error()
	}
	return one
}

// keepLife writes the timeline of a sandbox that is gone, or could not be made.
func (s *Store) keepLife(sb *Sandbox) {
	one := life(sb.ID, sb.config.GetMetadata(), sb.Failure, sb.Timeline())
	if sb.Failure != nil {
		one.Network = redact.JSON(sb.network)
	}
	object.Keep(s.options.Lives, s.log(sb), one)
}

// keepRefused writes the timeline of a pod that was refused before it had an id.
func (s *Store) keepRefused(config *runtimeapi.PodSandboxConfig, timeline *step.Timeline, err error) {
	if m := config.GetMetadata(); m.GetName() != "" {
		object.Keep(s.options.Lives, s.options.Logger, life(step.RefusedID("pod", nameOf(m)), m, err, timeline.Rows()))
	}
}

// NotePull adds an image pull to the timeline of its pod, if any. Without one, only a failed pull is kept.
func (s *Store) NotePull(pod *runtimeapi.PodSandboxConfig, row step.Row) {
	row.Kind = "image"
	if pod.GetMetadata() != nil {
		if sb, is := s.Named(nameOf(pod.GetMetadata())); is && s.Base.Err() == nil {
			sb.Rows.Add(row)
			s.Go(func() { s.keepTimeline(sb) })
			return
		}
	}
	if row.Error != "" {
		object.Keep(s.options.Lives, s.options.Logger, step.Life{
			Kind: "image", ID: step.RefusedID("image", row.Step), Name: row.Step, End: time.Now(), Error: row.Error, Rows: []step.Row{row},
		})
	}
}

// keepTimeline writes the facts, for the next daemon and for minicri timeline when none runs.
func (s *Store) keepTimeline(sb *Sandbox) {
	unlock, err := sb.Acquire(s.Base)
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
