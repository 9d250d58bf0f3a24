package container_test

import (
	"context"
	"errors"
	"slices"
	"strings"
	"testing"
	"testing/synctest"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/internal/step"
	"github.com/minicri/minicri/test/fake"
	"github.com/minicri/minicri/test/harness"
)

// steps are the steps of a container's life, by operation, in order (package container).
var steps = map[string][]step.Name{
	"create": {
		"container/check", "container/reserve", "container/record", "container/rootfs", "container/sources",
		"container/spec", "container/volumes", "container/nri create", "container/labels", "container/supervisor",
		"container/create", "container/nri created", "container/recheck",
	},
	"start":  {"container/nri start", "container/start", "container/nri started"},
	"update": {"container/nri update", "container/nri updated"},
	"stop":   {"container/kill", "container/nri stop"},
	"remove": {"container/nri remove", "container/delete", "container/remove rootfs", "container/remove record"},
}

// inside are the points within a step: where a record gets its name, and the starter's.
var inside = map[step.Name][]string{
	"container/record": {"rename containers"},
	"container/create": {"starter/asked", "starter/made", "starter/answered", "rename container-facts"},
	"container/start":  {"rename container-facts"},
}

// points are those that operations pass, in order.
func points(operations ...string) (all []string) {
	for _, operation := range operations {
		for _, name := range steps[operation] {
			if !strings.HasPrefix(name.Own(), "nri ") {
				all = append(append(append(all, name.Before()), inside[name]...), name.After())
			}
		}
	}
	return all
}

const fails, killed, cancelled, shimKilled = "error", "daemon killed", "cancelled", "shim killed"

// TestCrashes fails, cancels and kills each operation on a container at each of its points. Another container of the
// pod runs all the time; the name is free afterwards, and nothing is left.
func TestCrashes(t *testing.T) {
	harness.AllSteps(t, "store.go", steps)
	for _, row := range []struct {
		name   string
		state  string // the container's state when the operation begins
		points []string
		faults []string
		call   func(context.Context, *trial) error
	}{
		{"create", "", points("create")[4:], []string{fails, killed, cancelled, shimKilled}, create},
		{"start", "created", points("start"), []string{fails, killed, shimKilled}, start},
		{"stop", "running", points("stop"), []string{fails, killed, shimKilled}, stop},
		{"remove", "running", points("stop", "remove"), []string{fails, killed, shimKilled}, remove},
		{"remove created", "created", points("stop", "remove"), []string{fails, killed}, remove},
		{"remove ended", "ended", points("remove"), []string{fails, killed}, remove},
		{"undo", "", points("remove"), []string{fails, killed}, create},
		{"remove pod", "running", points("stop", "remove"), []string{fails, killed, shimKilled}, removePod},
	} {
		for _, point := range row.points {
			for _, fault := range row.faults {
				t.Run(row.name+"/"+point+"/"+fault, func(t *testing.T) {
					t.Parallel()
					synctest.Test(t, func(t *testing.T) {
						c := newTrial(t)
						c.bring(t, row.state)
						if row.name == "undo" {
							c.Arm("container/recheck before", func() error { return errors.New("recheck fails") })
						}
						c.strike(t, point, fault, row.call)
						c.check(t, row.name == "remove pod")
					})
				})
			}
		}
	}
}

// trial is a pod with a container that runs all the time, and one that is the case.
type trial struct {
	*fake.Node
	d                *fake.Daemon
	pod, witness, id string
	before           []string
}

func newTrial(t *testing.T) *trial {
	c := &trial{Node: fake.New(t)}
	c.d = c.Start()
	var err error
	c.pod, err = c.d.Sandboxes.Run(c.d.Ctx, podConfig, "")
	harness.Check(t, err)
	c.witness, err = c.create("witness")
	harness.Check(t, err)
	harness.Check(t, c.d.Containers.Start(c.d.Ctx, c.witness))
	c.before = c.Leaks()
	return c
}

var podConfig = &runtimeapi.PodSandboxConfig{
	Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "uid"},
	Linux:    &runtimeapi.LinuxPodSandboxConfig{},
}

func config(name string) *runtimeapi.ContainerConfig {
	return &runtimeapi.ContainerConfig{
		Metadata: &runtimeapi.ContainerMetadata{Name: name}, Image: &runtimeapi.ImageSpec{Image: "image"},
		Mounts: []*runtimeapi.Mount{{
			ContainerPath: "/data", Readonly: true, Image: &runtimeapi.ImageSpec{Image: "image"},
		}},
	}
}

func (c *trial) create(name string) (string, error) {
	return c.d.Containers.Create(c.d.Ctx, c.pod, config(name), podConfig)
}

func create(ctx context.Context, c *trial) error {
	_, err := c.d.Containers.Create(ctx, c.pod, config("case"), podConfig)
	return err
}

func start(ctx context.Context, c *trial) error  { return c.d.Containers.Start(ctx, c.id) }
func stop(ctx context.Context, c *trial) error   { return c.d.Containers.Stop(ctx, c.id, 0) }
func remove(ctx context.Context, c *trial) error { return c.d.Containers.Remove(ctx, c.id) }
func removePod(ctx context.Context, c *trial) error {
	return errors.Join(c.d.Sandboxes.Stop(ctx, c.pod), c.d.Sandboxes.Remove(ctx, c.pod))
}

// bring brings the container to a state.
func (c *trial) bring(t *testing.T, state string) {
	if state == "" {
		return
	}
	var err error
	c.id, err = c.create("case")
	harness.Check(t, err)
	if state != "created" {
		harness.Check(t, c.d.Containers.Start(c.d.Ctx, c.id))
	}
	if state == "ended" {
		harness.Check(t, c.d.Containers.Stop(c.d.Ctx, c.id, 0))
	}
}

func (c *trial) strike(t *testing.T, point, fault string, call func(context.Context, *trial) error) {
	released := make(chan struct{})
	do := func() error {
		<-released
		return nil
	}
	switch {
	case fault == fails:
		do = func() error { return errors.New("failpoint") }
	case strings.HasPrefix(point, "rename "): // a mutex is held there: a bubble never settles if that hangs
		do = func() error {
			if fault == killed {
				c.d.Die()
			}
			return nil
		}
	}
	ctx, cancel := context.WithCancel(c.d.Ctx)
	defer cancel()
	hit, done := c.Arm(point, do), make(chan error, 1)
	go func() { done <- call(ctx, c) }()
	<-hit
	switch fault {
	case fails:
		taken := point == "starter/answered" // the supervisor has the process by then
		harness.Want(t, <-done != nil || taken, "the step failed, and the request succeeded")
		c.Disarm()
	case cancelled:
		cancel()
		c.Disarm()
		close(released)
		err := <-done
		atEnd := strings.HasPrefix(point, "container/recheck") || strings.HasPrefix(point, "rename container-facts")
		harness.Want(t, err != nil || atEnd, "the request was cancelled, and succeeded")
	case killed:
		c.d.Kill()
		c.Disarm()
		close(released)
		c.d = c.Start()
	case shimKilled:
		c.KillSupervisor()
		c.Disarm()
		close(released)
		<-done // the request may succeed: the successor adopts the container
	}
}

// check removes the listed containers, uses the name again, and removes the pod.
func (c *trial) check(t *testing.T, podStops bool) {
	_, err := c.d.Supervisors.Ensure(c.d.Ctx, fake.Build) // a new supervisor, if one was killed
	harness.Check(t, err)
	synctest.Wait()
	for _, one := range c.d.Containers.ListPod(c.pod) {
		if one.ID == c.witness {
			running := one.State() == runtimeapi.ContainerState_CONTAINER_RUNNING
			sb, err := c.d.Sandboxes.Find(c.pod)
			harness.Check(t, err)
			harness.Want(t, running == c.Made("process", one.ID), "the other container is %v", one.State())
			harness.Want(t, running || podStops || !sb.Ready(), "the other container has ended")
			continue
		}
		ended := one.State() == runtimeapi.ContainerState_CONTAINER_EXITED
		harness.Want(t, ended != c.Made("process", one.ID), "a container is %v", one.State())
		harness.Check(t, c.d.Containers.Stop(c.d.Ctx, one.ID, 0))
		harness.Check(t, c.d.Containers.Remove(c.d.Ctx, one.ID))
	}
	if sb, err := c.d.Sandboxes.Find(c.pod); err == nil && sb.Ready() && !podStops {
		id, err := c.create("case")
		harness.Check(t, err)
		harness.Check(t, c.d.Containers.Start(c.d.Ctx, id))
		harness.Check(t, c.d.Containers.Remove(c.d.Ctx, id))
		harness.Want(t, slices.Equal(c.Leaks(), c.before), "left beside the pod: %q, before %q", c.Leaks(), c.before)
	}
	harness.Check(t, c.d.Sandboxes.Stop(c.d.Ctx, c.pod))
	harness.Check(t, c.d.Sandboxes.Remove(c.d.Ctx, c.pod))
	harness.Same(t, "left", c.Leaks(), nil)
}
