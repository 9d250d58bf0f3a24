package container_test

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"github.com/containerd/errdefs"
	"github.com/opencontainers/runtime-spec/specs-go"
	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/sandbox"
	"github.com/minicri/minicri/test/fake"
	"github.com/minicri/minicri/test/harness"
)

// in runs a test in a bubble, on a node in memory with a pod. The node is empty again after the test.
func in(t *testing.T, change func(*container.Options), test func(t *testing.T, c *trial)) {
	synctest.Test(t, func(t *testing.T) {
		c := &trial{Node: fake.New(t)}
		c.Change = change
		c.d = c.Start()
		var err error
		c.pod, err = c.d.Sandboxes.Run(c.d.Ctx, podConfig, "")
		harness.Check(t, err)
		test(t, c)
		harness.Check(t, removePod(c.d.Ctx, c))
		harness.Same(t, "left", c.Leaks(), nil)
	})
}

func TestLife(t *testing.T) {
	in(t, nil, func(t *testing.T, c *trial) {
		c.bring(t, "running")
		harness.Check(t, c.d.Containers.Stop(c.d.Ctx, c.id, time.Second))
		harness.Check(t, c.d.Containers.Remove(c.d.Ctx, c.id))
	})
}

func (c *trial) state(t *testing.T) runtimeapi.ContainerState {
	found, err := c.d.Containers.Find(c.id)
	harness.Check(t, err)
	return found.State()
}

// The state of a container is Unknown while no supervisor serves, over a restart too, and known again once one does.
func TestUnknownState(t *testing.T) {
	for _, restart := range []bool{false, true} {
		in(t, nil, func(t *testing.T, c *trial) {
			c.bring(t, "running")
			c.Arm("supervisor start", func() error { return errors.New("no memory") })
			if restart {
				c.d.Kill()
			}
			c.KillSupervisor()
			if restart {
				c.d, _ = c.Begin()
			}
			time.Sleep(time.Minute)
			if !restart { // a daemon that restores waits for the supervisors
				harness.Same(t, "state", c.state(t), runtimeapi.ContainerState_CONTAINER_UNKNOWN)
			}
			c.Disarm()
			time.Sleep(time.Minute)
			harness.Same(t, "state", c.state(t), runtimeapi.ContainerState_CONTAINER_RUNNING)
		})
	}
}

// A container that ends while neither a supervisor nor the daemon is its parent has the reason Unknown.
func TestExitThatNobodyHasSeen(t *testing.T) {
	in(t, nil, func(t *testing.T, c *trial) {
		c.bring(t, "running")
		found, err := c.d.Containers.Find(c.id)
		harness.Check(t, err)
		c.d.Kill()
		c.KillSupervisor()
		c.EndProcess(found.Facts().Process.PID)
		c.d = c.Start()
		time.Sleep(time.Minute)
		harness.Same(t, "state", c.state(t), runtimeapi.ContainerState_CONTAINER_EXITED)
		found, err = c.d.Containers.Find(c.id)
		harness.Check(t, err)
		harness.Same(t, "reason", found.Facts().Reason, "Unknown")
		harness.Same(t, "exit code", found.Facts().ExitCode, 255)
	})
}

// A field that no list could leave out is refused by its name.
func TestFieldThatBreaksLists(t *testing.T) {
	in(t, nil, func(t *testing.T, c *trial) {
		endless := config("endless")
		endless.Image.UserSpecifiedImage = strings.Repeat("i", 8<<20)
		_, err := c.d.Containers.Create(c.d.Ctx, c.pod, endless, podConfig)
		harness.WantError(t, err, "config.image")
		refused := errdefs.IsResourceExhausted(err) || errdefs.IsInvalidArgument(err)
		harness.Want(t, refused, "the kind of the error: %v", err)
	})
}

// plugins are NRI plugins that note the steps, and fail at some.
type plugins struct {
	steps string
	fails string
}

func (p *plugins) step(name string) error {
	p.steps += name + " "
	if name == p.fails {
		return errors.New("a plugin fails at " + name)
	}
	return nil
}

func (p *plugins) Enabled() bool { return true }

func (p *plugins) Create(context.Context, *sandbox.Sandbox, *container.Container, *specs.Spec,
	container.Inject,
) ([]container.Change, error) {
	return nil, p.step("create")
}

func (p *plugins) Created(context.Context, *sandbox.Sandbox, *container.Container) error {
	return p.step("created")
}

func (p *plugins) Start(context.Context, *sandbox.Sandbox, *container.Container) error {
	return p.step("start")
}

func (p *plugins) Started(context.Context, *sandbox.Sandbox, *container.Container) error {
	return p.step("started")
}

func (p *plugins) Updated(context.Context, *sandbox.Sandbox, *container.Container) error {
	return p.step("updated")
}

func (p *plugins) Remove(context.Context, *sandbox.Sandbox, *container.Container) error {
	return p.step("remove")
}

func (p *plugins) Update(_ context.Context, _ *sandbox.Sandbox, _ *container.Container,
	asked *runtimeapi.LinuxContainerResources,
) (*runtimeapi.LinuxContainerResources, []container.Change, error) {
	return asked, nil, p.step("update")
}

func (p *plugins) Stop(context.Context, *sandbox.Sandbox, *container.Container) ([]container.Change, error) {
	return nil, p.step("stop")
}

// Plugins get each step of a container in order. One that fails before a step refuses it, and one that fails after a
// step, or at the end, changes nothing.
func TestStepsOfPlugins(t *testing.T) {
	for _, test := range []struct{ fails, at, steps string }{
		{"", "", "create created start started stop remove "},
		{"create", "create", "create stop remove "},
		{"created", "", "create created start started stop remove "},
		{"start", "start", "create created start stop remove "},
		{"started", "", "create created start started stop remove "},
		{"stop", "", "create created start started stop remove "},
		{"remove", "", "create created start started stop remove "},
	} {
		t.Run(test.fails, func(t *testing.T) {
			p := &plugins{fails: test.fails}
			in(t, func(o *container.Options) { o.Plugins = p }, func(t *testing.T, c *trial) {
				id, err := c.create("app")
				harness.Same(t, "Create fails", err != nil, test.at == "create")
				if err == nil {
					harness.Same(t, "Start fails", c.d.Containers.Start(c.d.Ctx, id) != nil, test.at == "start")
					harness.Check(t, c.d.Containers.Stop(c.d.Ctx, id, 0))
					harness.Check(t, c.d.Containers.Remove(c.d.Ctx, id))
				}
			})
			harness.Same(t, "steps", p.steps, test.steps)
		})
	}
}

// events records the events of containers, each with the state, exit code and reason of then.
type events struct {
	mu  sync.Mutex
	all []string
}

func (e *events) ContainerEvent(c *container.Container, kind runtimeapi.ContainerEventType) {
	e.mu.Lock()
	defer e.mu.Unlock()
	name := strings.TrimSuffix(strings.TrimPrefix(kind.String(), "CONTAINER_"), "_EVENT")
	e.all = append(e.all, name+" "+end(c))
}

func end(c *container.Container) string {
	state := strings.TrimPrefix(c.State().String(), "CONTAINER_")
	return strings.TrimSpace(fmt.Sprintf("%s %d %s", state, c.Facts().ExitCode, c.Facts().ExitReason()))
}

// An end beside another operation is reported once, after the creation, and does not change afterwards.
func TestEndBesideAnOperation(t *testing.T) {
	for _, c := range []struct {
		name, point string
		end         func(d *fake.Daemon, c *container.Container)
		want        []string
	}{
		{"an end before the list", "container/recheck after", func(d *fake.Daemon, c *container.Container) {
			d.EndProcess(c.Facts().Process.PID)
		}, []string{"CREATED EXITED 137 Error", "STOPPED EXITED 137 Error"}},
		{"a stop beside a start", "container/start before", func(d *fake.Daemon, c *container.Container) {
			go func() { harness.Check(t, d.Containers.Stop(d.Ctx, c.ID, 0)) }()
		}, []string{"CREATED CREATED 0", "STOPPED EXITED 137 Error"}},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n, seen := newTrial(t), &events{}
				n.d.Kill()
				n.Change = func(o *container.Options) { o.Events = seen }
				n.d = n.Start()
				isCase := func(c *container.Container) bool { return c.Config().GetMetadata().GetName() == "case" }
				n.Arm(c.point, func() error {
					c.end(n.d, n.d.Containers.All(isCase)[0])
					time.Sleep(time.Second) // the end is noted
					return nil
				})
				id, err := n.create("case")
				harness.Check(t, err)
				harness.WantError(t, n.d.Containers.Start(n.d.Ctx, id))
				harness.Same(t, "events", seen.all, c.want)
				one, _ := n.d.Containers.Get(id)
				harness.Same(t, "the container", "STOPPED "+end(one), c.want[1])
			})
		})
	}
}

// A pod that is stopped at any step of the creation of a container has no container that runs.
func TestPodStopsBesideACreation(t *testing.T) {
	for _, point := range points("create")[4:] {
		if strings.HasPrefix(point, "rename ") { // a mutex is held there
			continue
		}
		t.Run(point, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				n, stopped := newTrial(t), make(chan error, 1)
				n.Arm(point, func() error {
					go func() { stopped <- n.d.Sandboxes.Stop(n.d.Ctx, n.pod) }()
					time.Sleep(time.Second) // the stop waits for the creation, or ends the creation
					return nil
				})
				id, err := n.create("case")
				if err == nil {
					harness.WantError(t, n.d.Containers.Start(n.d.Ctx, id))
				}
				harness.Check(t, <-stopped)
				for _, one := range n.d.Containers.ListPod(n.pod) {
					harness.Same(t, "state", one.State(), runtimeapi.ContainerState_CONTAINER_EXITED)
				}
				harness.Check(t, n.d.Sandboxes.Remove(n.d.Ctx, n.pod))
				harness.Same(t, "left", n.Leaks(), nil)
			})
		})
	}
}

// A container is made with the config of its own pod. The kubelet makes that config anew for each container, so that
// only the identity of the pod counts.
//
// cri: PodSandboxMetadata.namespace PodSandboxMetadata.uid
func TestConfigOfAnotherPod(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := newTrial(t)
		create := func(change func(*runtimeapi.PodSandboxConfig)) error {
			of := proto.CloneOf(podConfig)
			change(of)
			_, err := n.d.Containers.Create(n.d.Ctx, n.pod, config("case"), of)
			return err
		}
		for field, change := range harness.Sorted(map[string]func(*runtimeapi.PodSandboxConfig){
			"uid":       func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Uid = "another" },
			"name":      func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Name = "another" },
			"namespace": func(c *runtimeapi.PodSandboxConfig) { c.Metadata.Namespace = "another" },
		}) {
			harness.WantError(t, create(change), "sandbox_config.metadata."+field+":")
		}
		harness.Same(t, "left", n.Leaks(), n.before)
		harness.Check(t, create(func(c *runtimeapi.PodSandboxConfig) {
			c.Metadata.Attempt, c.Annotations = 7, map[string]string{"of": "today"}
		}))
	})
}
