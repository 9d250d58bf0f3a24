package container_test

import (
	"testing"
	"testing/synctest"
	"time"

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
