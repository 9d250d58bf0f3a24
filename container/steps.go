package container

import (
	"cmp"
	"context"
	"fmt"
	"log/slog"
	"slices"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/object"
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
	stepSupervisor   step.Name = "container/supervisor"
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

// Steps returns the steps of a container's life, in order. Undo and recovery do those of remove.
func Steps() []step.Step {
	return slices.Concat(
		object.Steps("create", stepCheck, stepReserve, stepRecord, stepRootfs, stepSources, stepVolumes, stepSpec, stepNRICreate, stepLabels, stepSupervisor, stepCreate, stepNRICreated, stepRecheck),
		object.Steps("start", stepNRIStart, stepStart, stepNRIStarted),
		object.Steps("update", stepNRIUpdate, stepNRIUpdated),
		object.Steps("stop", stepKill, stepNRIStop),
		object.Steps("remove", stepNRIRemove, stepDelete, stepRemoveRootfs, stepRemoveRecord),
	)
}

func (s *Store) begin(ctx context.Context, c *Container) *step.Sequence {
	return step.Begin(ctx, s.options.Observe, c.Rows)
}

// keepLife writes the timeline of a container, by its name or NAMESPACE/POD/CONTAINER while the pod exists.
func (s *Store) keepLife(id, sandboxID string, m *runtimeapi.ContainerMetadata, failure error, rows []step.Row) {
	life := step.Life{Kind: "container", ID: id, Pod: sandboxID, Name: m.GetName(), Attempt: m.GetAttempt(), End: time.Now(), Rows: rows}
	if pod, err := s.options.Sandboxes.Find(sandboxID); err == nil {
		of := pod.Config().GetMetadata()
		life.Name = of.GetNamespace() + "/" + of.GetName() + "/" + life.Name
	}
	if failure != nil {
		life.Error = failure.Error()
	}
	object.Keep(s.options.Lives, s.options.Logger, life)
}

func (s *Store) log(c *Container) *slog.Logger {
	names := []any{"sandbox", c.SandboxID}
	if pod, err := s.options.Sandboxes.Find(c.SandboxID); err == nil {
		names = pod.Names()
	}
	return s.options.Logger.With(append(names, "container", c.config.GetMetadata().GetName(), "id", c.ID, "image", c.config.GetImage().GetImage())...)
}

func (c *Container) noteExit(f *Facts) {
	began := cmp.Or(f.StartedAt, f.FinishedAt)
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
	c.Rows.Add(row)
}
