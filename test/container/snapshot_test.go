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
	store, err := image.Open(t.Context(), image.Config{Root: p.Root, Logger: slog.New(slog.DiscardHandler)})
	check(t, err)
	orphan := strings.Repeat("ab", 32)
	for _, key := range []string{orphan, orphan + "-image-0"} {
		check(t, store.Prepare(t.Context(), key, harness.BusyboxImage, image.PrepareOptions{}))
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
