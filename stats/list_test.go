package stats

import (
	"context"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/test/harness"
)

func TestListLeavesOutWhatCannotBeMeasured(t *testing.T) {
	layers := t.TempDir()
	m := newMeter(t, directories(layers))
	path := makeCgroup(t, m.hierarchies, "listed")
	must(t, os.MkdirAll(filepath.Join(layers, "listed", "sub"), 0o755))
	must(t, os.WriteFile(filepath.Join(layers, "listed", "sub", "file"), make([]byte, 1<<20), 0o600))
	list := m.Containers(t.Context(), []Container{
		{ID: "vanished", Cgroup: path + "/vanished"},
		{ID: "broken", Cgroup: path + "/cgroup.procs/not-a-directory"},
		{ID: "listed", Cgroup: path},
	})
	harness.Want(t, len(list) == 1, "%d are listed, not the one that there is: %v", len(list), list)
	// Alone it is waited for longer than in a list.
	listed, err := m.Container(t.Context(), Container{ID: "listed", Cgroup: path})
	must(t, err)
	layer := listed.GetWritableLayer()
	between(t, "bytes of the layer", 1<<20, layer.GetUsedBytes().GetValue(), 1<<20+64<<10)
	between(t, "inodes of the layer", 3, layer.GetInodesUsed().GetValue(), 3)
	harness.Want(t, layer.GetTimestamp() > 0 && layer.GetFsId().GetMountpoint() == layers, "the layer is %v", layer)
}

// cri: ContainerStats.memory
func TestContainerThatDoesNotRunHasItsLayer(t *testing.T) {
	layers := t.TempDir()
	m := newMeter(t, directories(layers))
	must(t, os.Mkdir(filepath.Join(layers, "ended"), 0o755))
	got, err := m.Container(t.Context(), Container{ID: "ended", Cgroup: "/minicri-stats-no-such-cgroup"})
	must(t, err)
	harness.Want(t, got.GetCpu() == nil && got.GetMemory() == nil && got.GetWritableLayer().GetInodesUsed().GetValue() == 1,
		"the stats of a container that has ended are %v", got)
}

// hung is a layer on a disk that does not answer.
type hung struct {
	directories
	entered chan struct{}
}

func (h hung) SnapshotUsage(ctx context.Context, id string) (image.Usage, error) {
	if id != "hung" {
		return h.directories.SnapshotUsage(ctx, id)
	}
	close(h.entered) // twice would panic: one walk at a time
	<-ctx.Done()
	return image.Usage{}, ctx.Err()
}

// cri: ContainerStats.cpu ContainerStats.writable_layer
func TestHungLayerHoldsUpNobody(t *testing.T) {
	layers := t.TempDir()
	source := hung{directories(layers), make(chan struct{})}
	m := newMeter(t, source)
	path := makeCgroup(t, m.hierarchies, "beside")
	must(t, os.Mkdir(filepath.Join(layers, "beside"), 0o755))
	// The least of them: the machine may be busy.
	const most = layerWait + 50*time.Millisecond
	fastest, measured := time.Hour, false
	for began := time.Now(); (!measured || fastest > most) && time.Since(began) < 10*time.Second; {
		began := time.Now()
		list := m.Containers(t.Context(), []Container{{ID: "hung", Cgroup: path}, {ID: "beside", Cgroup: path}})
		fastest = min(fastest, time.Since(began))
		harness.Need(t, len(list) == 2 && list[0].GetWritableLayer() == nil && list[0].GetCpu() != nil, "the list is %v", list)
		measured = list[1].GetWritableLayer() != nil
	}
	harness.Want(t, measured && fastest <= most,
		"the fastest list took %v beside a layer that hangs; the other layer is measured: %v", fastest, measured)
	<-source.entered
}

func TestRateOfACgroupMadeAgain(t *testing.T) {
	m := newMeter(t, directories(t.TempDir()))
	at := time.Now()
	m.rate("again", at, time.Hour)
	harness.Same(t, "the rate over two lives of a cgroup", m.rate("again", at.Add(time.Minute), time.Second), nil)
	harness.Same(t, "30 s of cpu time in a minute", m.rate("again", at.Add(2*time.Minute), 31*time.Second).GetValue(), 5e8)
}
