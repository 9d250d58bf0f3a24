package container

import (
	"log/slog"
	"strings"
	"testing"

	"github.com/minicri/minicri/image"
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
