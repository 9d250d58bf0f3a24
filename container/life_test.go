package container_test

import (
	"fmt"
	"strings"
	"sync"
	"testing"
	"testing/synctest"
	"time"

	"google.golang.org/protobuf/proto"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/container"
	"github.com/minicri/minicri/test/fake"
	"github.com/minicri/minicri/test/harness"
)

func TestLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := fake.New(t)
		d := n.Start()
		id, err := d.Sandboxes.Run(d.Ctx, podConfig, "")
		harness.Check(t, err)
		c, err := d.Containers.Create(d.Ctx, id, config("app"), podConfig)
		harness.Check(t, err)
		harness.Check(t, d.Containers.Start(d.Ctx, c))
		harness.Check(t, d.Containers.Stop(d.Ctx, c, time.Second))
		harness.Check(t, d.Containers.Remove(d.Ctx, c))
		harness.Check(t, d.Sandboxes.Stop(d.Ctx, id))
		harness.Check(t, d.Sandboxes.Remove(d.Ctx, id))
		harness.Same(t, "left", n.Leaks(), nil)
	})
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
