package container_test

import (
	"testing"
	"testing/synctest"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/fake"
	"github.com/minicri/minicri/test/harness"
)

func TestLife(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		n := fake.New(t)
		defer n.End()
		d := n.Start()
		pod := &runtimeapi.PodSandboxConfig{
			Metadata: &runtimeapi.PodSandboxMetadata{Name: "web", Namespace: "default", Uid: "uid"},
			Linux:    &runtimeapi.LinuxPodSandboxConfig{},
		}
		config := &runtimeapi.ContainerConfig{
			Metadata: &runtimeapi.ContainerMetadata{Name: "app"}, Image: &runtimeapi.ImageSpec{Image: "image"},
		}
		id, err := d.Sandboxes.Run(d.Ctx, pod, "")
		harness.Check(t, err)
		c, err := d.Containers.Create(d.Ctx, id, config, pod)
		harness.Check(t, err)
		harness.Check(t, d.Containers.Start(d.Ctx, c))
		harness.Check(t, d.Containers.Stop(d.Ctx, c, time.Second))
		harness.Check(t, d.Containers.Remove(d.Ctx, c))
		harness.Check(t, d.Sandboxes.Stop(d.Ctx, id))
		harness.Check(t, d.Sandboxes.Remove(d.Ctx, id))
		harness.Same(t, "left", n.Leaks(), nil)
	})
}
