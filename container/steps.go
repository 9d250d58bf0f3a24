package container

import (
	"context"
	"fmt"
	"log/slog"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/step"
)

// The names of the steps of a container.
const (
	stepCheck        step.Name = "container/check"
	stepReserve      step.Name = "container/reserve"
	stepRecord       step.Name = "container/record"
	stepRootfs       step.Name = "container/rootfs"
	stepSources      step.Name = "container/sources"
	stepVolumes      step.Name = "container/volumes"
	stepSpec         step.Name = "container/spec"
	stepNRICreate    step.Name = "container/nri create"
	stepLabels       step.Name = "container/labels"
	stepShim         step.Name = "container/shim"
	stepCreate       step.Name = "container/create"
	stepNRICreated   step.Name = "container/nri created"
	stepRecheck      step.Name = "container/recheck"
	stepNRIStart     step.Name = "container/nri start"
	stepStart        step.Name = "container/start"
	stepNRIStarted   step.Name = "container/nri started"
	stepNRIUpdate    step.Name = "container/nri update"
	stepNRIUpdated   step.Name = "container/nri updated"
	stepKill         step.Name = "container/kill"
	stepNRIStop      step.Name = "container/nri stop"
	stepNRIRemove    step.Name = "container/nri remove"
	stepDelete       step.Name = "container/delete"
	stepRemoveRootfs step.Name = "container/remove rootfs"
	stepRemoveRecord step.Name = "container/remove record"
)

// WithNRI is a container of a node with NRI (step.Step.Only).
const WithNRI = "NRI"

// Steps are those of a container's life, by operation, in their order. An undo
// and a recovery do those of remove.
func Steps() []step.Step {
	return []step.Step{
		{Name: stepCheck, Operation: "create"},
		{Name: stepReserve, Operation: "create"},
		{Name: stepRecord, Operation: "create"},
		{Name: stepRootfs, Operation: "create"},
		{Name: stepSources, Operation: "create"},
		{Name: stepVolumes, Operation: "create"},
		{Name: stepSpec, Operation: "create"},
		{Name: stepNRICreate, Operation: "create", Only: WithNRI},
		{Name: stepLabels, Operation: "create"},
		{Name: stepShim, Operation: "create"},
		{Name: stepCreate, Operation: "create"},
		{Name: stepNRICreated, Operation: "create", Only: WithNRI},
		{Name: stepRecheck, Operation: "create"},

		{Name: stepNRIStart, Operation: "start", Only: WithNRI},
		{Name: stepStart, Operation: "start"},
		{Name: stepNRIStarted, Operation: "start", Only: WithNRI},
		{Name: stepNRIUpdate, Operation: "update", Only: WithNRI},
		{Name: stepNRIUpdated, Operation: "update", Only: WithNRI},
		{Name: stepKill, Operation: "stop"},
		{Name: stepNRIStop, Operation: "stop", Only: WithNRI},

		{Name: stepNRIRemove, Operation: "remove", Only: WithNRI},
		{Name: stepDelete, Operation: "remove"},
		{Name: stepRemoveRootfs, Operation: "remove"},
		{Name: stepRemoveRecord, Operation: "remove"},
	}
}

// begin starts a sequence of steps on a container.
func (s *Store) begin(ctx context.Context, c *Container) *step.Sequence {
	return step.Begin(ctx, s.options.Observe, c.timeline)
}

// Timeline is what was done to the container until now, by this daemon and by
// those before.
func (c *Container) Timeline() []step.Row { return c.timeline.Rows() }

// keepLife writes down the timeline of a container that is gone, and of one that
// could not be made.
func (s *Store) keepLife(c *Container) {
	life := step.Life{Kind: "container", ID: c.ID, Pod: c.SandboxID, Name: s.lifeName(c), Attempt: c.config.GetMetadata().GetAttempt(), End: time.Now(), Rows: c.Timeline()}
	if failure := c.failure.Load(); failure != nil {
		life.Error = (*failure).Error()
	}
	if err := s.options.Lives.Keep(life); err != nil {
		s.log(c).Warn("the timeline of a container is not kept", "err", err)
	}
}

// keepRefused writes down the timeline of a container that was refused before it
// had an id: whose image names no program, say.
func (c *creation) keepRefused(config *runtimeapi.ContainerConfig, timeline *step.Timeline) {
	if c.sandbox == nil {
		return
	}
	pod, m := c.sandbox.Config().GetMetadata(), config.GetMetadata()
	life := step.Life{
		Kind: "container", ID: step.RefusedID("container", nameOf(c.sandbox.ID, m)), Pod: c.sandbox.ID,
		Name: pod.GetNamespace() + "/" + pod.GetName() + "/" + m.GetName(), Attempt: m.GetAttempt(),
		End: time.Now(), Error: c.steps.Err().Error(), Rows: timeline.Rows(),
	}
	if err := c.owner.options.Lives.Keep(life); err != nil {
		c.owner.options.Logger.Warn("the timeline of a container is not kept", "container", life.Name, "err", err)
	}
}

// log names a container and its pod in each line.
func (s *Store) log(c *Container) *slog.Logger {
	names := []any{"sandbox", c.SandboxID}
	if pod, err := s.options.Sandboxes.Find(c.SandboxID); err == nil {
		names = pod.Names()
	}
	return s.options.Logger.With(append(names, "container", c.config.GetMetadata().GetName(), "id", c.ID, "image", c.config.GetImage().GetImage())...)
}

// logExit says how a container has ended.
func (s *Store) logExit(c *Container, f *Facts) {
	s.log(c).Info("container ended", "code", f.ExitCode, "reason", f.ExitReason(), "oom", f.OOMKilled)
}

// noteExit adds to the timeline what the container did from its start to its end.
func (c *Container) noteExit(f *Facts) {
	began := f.StartedAt
	if began == 0 {
		began = f.FinishedAt
	}
	row := step.Row{Kind: "exit", Step: "ran", Start: time.Unix(0, began), Took: time.Duration(f.FinishedAt - began)}
	row.Note = fmt.Sprintf("%s, exit code %d", f.ExitReason(), f.ExitCode)
	switch limit := c.Resources().GetMemoryLimitInBytes(); {
	case f.OOMKilled && limit > 0:
		row.Error = fmt.Sprintf("the kernel killed it because it used all of its memory, %d MiB: raise the container's memory limit", limit>>20)
	case f.OOMKilled:
		row.Error = "the kernel killed it because its pod or the node had no memory left"
	case f.Message != "":
		row.Error = f.Message
	}
	c.timeline.Add(row)
}

// lifeName is NAMESPACE/POD/CONTAINER, or the container's name if the pod is gone.
func (s *Store) lifeName(c *Container) string {
	name := c.config.GetMetadata().GetName()
	pod, err := s.options.Sandboxes.Find(c.SandboxID)
	if err != nil {
		return name
	}
	m := pod.Config().GetMetadata()
	return m.GetNamespace() + "/" + m.GetName() + "/" + name
}
