package container

import (
	"log/slog"
	"net/http"
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
	orphan := strings.Repeat("ab", 32)
	p.makeSnapshots(orphan, orphan+"-image-0")
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
	p.makeSnapshots(orphan)
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
	if err := client.Do(t.Context(), http.MethodDelete, "/snapshots/orphans/"+id); err == nil || !strings.Contains(err.Error(), "belongs to container") {
		t.Errorf("the layer of a container: %v", err)
	}
	check(t, client.Do(t.Context(), http.MethodDelete, "/snapshots/orphans/"+orphan)) // gone already
	same(t, "the file of the container", p.exec(id, "cat /kept"), "kept")
}

// makeSnapshots makes layers that no container explains, where no daemon runs.
func (p *pod) makeSnapshots(keys ...string) {
	p.t.Helper()
	store, err := image.Open(p.t.Context(), image.Config{Root: p.Root, Logger: slog.New(slog.DiscardHandler)})
	check(p.t, err)
	for _, key := range keys {
		check(p.t, store.Prepare(p.t.Context(), key, harness.BusyboxImage, image.PrepareOptions{}))
	}
	check(p.t, store.Close())
}
