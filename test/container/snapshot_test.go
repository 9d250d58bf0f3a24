package container

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/internal/inspect"
	"github.com/minicri/minicri/test/harness"
)

// A layer that no container explains is removed when the daemon starts; those of
// containers stay, and minicri check has nothing to say of them.
func TestSnapshotsWithoutContainer(t *testing.T) {
	p := newPod(t)
	id := p.run("app", "echo kept > /kept; "+forever)
	p.Stop()
	store, err := image.Open(t.Context(), image.Config{Root: p.Root, Logger: slog.New(slog.DiscardHandler)})
	check(t, err)
	orphan := strings.Repeat("ab", 32)
	for _, key := range []string{orphan, orphan + "-image-0"} {
		err = store.Prepare(t.Context(), key, harness.BusyboxImage, image.PrepareOptions{})
		check(t, err)
	}
	check(t, store.Close())
	p.Start()
	eventually(t, "the layers are removed", func() bool { return strings.Count(p.Log(), "name="+orphan) == 2 })
	if left := harness.Info[[]string](t, p.Node, "orphanSnapshots"); len(left) != 0 {
		t.Errorf("snapshots without a container: %v", left)
	}
	if output, err := p.RunCommand("check"); err != nil || strings.Contains(output, "snapshot") {
		t.Errorf("check: %v\n%s", err, output)
	}
	same(t, "the file of the container", p.exec(id, "cat /kept"), "kept")
}

// minicri check finds a layer that no container explains, and --fix removes it: from
// the store where no daemon runs. One that runs refuses to remove the layers of
// its containers.
func TestCheckRemovesSnapshotsWithoutContainer(t *testing.T) {
	p := newPod(t)
	id := p.run("app", "echo kept > /kept; "+forever)
	orphan := strings.Repeat("cd", 32)
	p.Stop()
	store, err := image.Open(t.Context(), image.Config{Root: p.Root, Logger: slog.New(slog.DiscardHandler)})
	check(t, err)
	err = store.Prepare(t.Context(), orphan, harness.BusyboxImage, image.PrepareOptions{})
	check(t, err)
	check(t, store.Close())
	if output, err := p.RunCommand("check"); err == nil || !strings.Contains(output, "snapshot "+orphan+" has no container") {
		t.Errorf("check: %v\n%s", err, output)
	}
	if output, err := p.RunCommand("check", "--fix"); err != nil {
		t.Errorf("check --fix: %v\n%s", err, output)
	}
	if output, err := p.RunCommand("check"); err != nil || strings.Contains(output, "snapshot") {
		t.Errorf("check after --fix: %v\n%s", err, output)
	}
	p.Start()
	client := inspect.NewClient(inspect.DebugSocket(p.State))
	if err := client.Delete(t.Context(), "/snapshots/orphans/"+id); err == nil || !strings.Contains(err.Error(), "belongs to container") {
		t.Errorf("the layer of a container: %v", err)
	}
	check(t, client.Delete(t.Context(), "/snapshots/orphans/"+orphan)) // gone already
	same(t, "the file of the container", p.exec(id, "cat /kept"), "kept")
}
