package container_test

import (
	"context"
	"slices"
	"strings"
	"sync/atomic"
	"testing"
	"testing/synctest"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/crash/cases"
	"github.com/minicri/minicri/test/harness"
)

// An operation that hangs at any of its points delays no other pod, and no other container of the pod. synctest ends a
// test in which all wait.
//
// attack: denial of service: a step of the life of a pod or a container hangs: a disk, a plugin, the supervisor
// held: another pod starts, runs a container, and is removed meanwhile, and so is another container of the same pod
func TestOthersGoOn(t *testing.T) {
	type operation struct {
		name, state string // state is the one of the container when the operation begins
		points      []string
		call        func(context.Context, *trial) error
	}
	operations := []operation{
		{"create", "", points("create")[4:], create},
		{"start", "created", points("start"), start},
		{"stop", "running", points("stop"), stop},
		{"remove", "running", points("remove"), remove},
	}
	for _, row := range cases.All() {
		if row.Pod.Name != cases.OwnNetwork.Name || !slices.Contains(row.Faults, cases.Error) {
			continue
		}
		switch row.Operation {
		case cases.Run:
			operations = append(operations, operation{"run pod", "", row.Points, runPod})
		case cases.Remove:
			operations = append(operations, operation{"remove pod", "ended", row.Points, removePod})
		}
	}
	for _, o := range operations {
		for _, point := range o.points {
			if strings.HasPrefix(point, "rename ") { // files of one object; a bubble never settles if a mutex is held
				continue
			}
			t.Run(o.name+"/"+point, func(t *testing.T) {
				t.Parallel()
				synctest.Test(t, func(t *testing.T) { hangAndGoOn(t, o.state, point, o.call) })
			})
		}
	}
}

func hangAndGoOn(t *testing.T, state, point string, call func(context.Context, *trial) error) {
	c := newTrial(t)
	c.bring(t, state)
	released, done := make(chan struct{}), make(chan error, 1)
	var hangs atomic.Bool
	hit := c.Arm(point, func() error {
		if !hangs.Swap(true) {
			<-released
		}
		return nil
	})
	go func() { done <- call(c.d.Ctx, c) }()
	<-hit
	c.useAnotherPod(t)
	if strings.HasPrefix(point, "container/") {
		harness.Check(t, c.d.Containers.Stop(c.d.Ctx, c.witness, 0))
		harness.Check(t, c.d.Containers.Remove(c.d.Ctx, c.witness))
	}
	close(released)
	harness.Check(t, <-done)
}

func (c *trial) useAnotherPod(t *testing.T) {
	pod := &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "another", Namespace: "default", Uid: "another"},
		Linux:    &runtimeapi.LinuxPodSandboxConfig{},
	}
	another, err := c.d.Sandboxes.Run(c.d.Ctx, pod, "")
	harness.Check(t, err)
	id, err := c.d.Containers.Create(c.d.Ctx, another, config("case"), pod)
	harness.Check(t, err)
	harness.Check(t, c.d.Containers.Start(c.d.Ctx, id))
	harness.Check(t, c.d.Containers.Stop(c.d.Ctx, id, 0))
	harness.Check(t, c.d.Containers.Remove(c.d.Ctx, id))
	harness.Check(t, c.d.Sandboxes.Stop(c.d.Ctx, another))
	harness.Check(t, c.d.Sandboxes.Remove(c.d.Ctx, another))
}

func runPod(ctx context.Context, c *trial) error {
	_, err := c.d.Sandboxes.Run(ctx, &runtimeapi.PodSandboxConfig{
		Metadata: &runtimeapi.PodSandboxMetadata{Name: "case", Namespace: "default", Uid: "case"},
		Linux:    &runtimeapi.LinuxPodSandboxConfig{},
	}, "")
	return err
}
