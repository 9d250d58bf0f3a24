// Command image measures the image half of minicri against the containerd in PATH: the same
// image, from the same registry on loopback, by CRI PullImage, in turn within one run. Each
// pull is made by a process just started, on a root just made.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"syscall"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"golang.org/x/sys/unix"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/test/bench/contender"
	"github.com/minicri/minicri/test/hostile/registry"
)

func main() {
	rounds := flag.Int("rounds", 5, "pulls by each runtime")
	small := flag.Int("small", 1000, "images that ListImages is timed with")
	flag.Parse()
	contender.Main("image", func(ctx context.Context, dir string) {
		host, stop := serveRegistry()
		defer stop()
		reference := pushBigImage(host)
		var p pulls
		for round := range *rounds {
			for i, name := range []string{contender.Minicri, contender.Containerd} {
				p.pull(ctx, filepath.Join(dir, fmt.Sprintf("%c%d", 'a'+i, round)), name, i, reference) // short: sockets are below it
			}
		}
		contender.PrintTable(append(p.rows(), benchStore(ctx, filepath.Join(dir, "n"), host, *small)...)...)
	})
}

// pulls are what they took, what the process used of the CPU, with children that it waited
// for, and its most resident memory.
type pulls struct {
	wall, cpu contender.Sample
	peak      [2][]float64
}

// pull measures one on a filesystem just made: on a used one, ext4 looks at every inode that
// was freed within the last minute before it gives one out, which would be most of what is
// measured.
func (p *pulls) pull(ctx context.Context, dir, name string, i int, reference string) {
	disk := dir + ".disk"
	contender.Check(errors.Join(os.WriteFile(disk, nil, 0o600), os.Truncate(disk, 2<<30), os.Mkdir(dir, 0o700)))
	for _, command := range [][]string{{"mkfs.ext4", "-q", disk}, {"mount", "-o", "loop", disk, dir}} {
		if out, err := exec.CommandContext(ctx, command[0], command[1:]...).CombinedOutput(); err != nil {
			contender.Check(fmt.Errorf("%v: %w: %s", command, err, out))
		}
	}
	defer contender.Finally(func() error { return errors.Join(unix.Unmount(dir, unix.MNT_DETACH), os.Remove(disk)) })
	n := contender.Start(ctx, filepath.Join(dir, "n"), contender.Runtime{Name: name})
	defer contender.Finally(n.Close)
	before := contender.CPU(n.PID(), true)
	syscall.Sync()
	p.wall.Time(i, func() {
		contender.Must(n.Images.PullImage(ctx, &runtimeapi.PullImageRequest{Image: &runtimeapi.ImageSpec{Image: reference}}))
	})
	p.cpu[i] = append(p.cpu[i], contender.CPU(n.PID(), true)-before)
	p.peak[i] = append(p.peak[i], float64(contender.PeakMemory(n.PID()))/1024)
}

func (p *pulls) rows() []contender.Row {
	return []contender.Row{
		contender.Row{What: "PullImage, p50 ms", AtMost: 0.7}.Medians(p.wall),
		contender.Row{What: "its CPU, p50 ms", AtMost: 0.7}.Medians(p.cpu),
		{What: "its peak memory, p50 MiB", AtMost: 0.5, Ours: contender.Quantile(p.peak[0], 0.5), Theirs: contender.Quantile(p.peak[1], 0.5)},
	}
}

// snapshots of containers are made and removed.
const snapshots = 300

// benchStore times what containers need of the store, and ListImages.
func benchStore(ctx context.Context, dir, host string, count int) []contender.Row {
	root := filepath.Join(dir, "root") // as contender has it
	store := contender.Must(image.Open(ctx, image.Config{Root: root}))
	layer := contender.LayerOf(registry.File("file", 0o644, string(make([]byte, 1024))))
	for i := range count { // images that differ in their configuration alone
		reference := push(host, fmt.Sprintf("bench/small%d:1", i), contender.ImageOf(label(fmt.Sprint(i)), layer))
		contender.Must(store.Pull(ctx, reference, image.Auth{}, nil))
	}
	syscall.Sync()
	var prepare, remove, list contender.Sample
	id := store.List()[0].ID
	for i := range snapshots {
		key := fmt.Sprintf("container%d", i)
		prepare.Time(0, func() { contender.Check(store.Prepare(ctx, key, id, image.PrepareOptions{})) })
		remove.Time(0, func() { contender.Check(store.RemoveSnapshot(ctx, key)) })
	}
	store.Close()
	began := time.Now()
	n := contender.Start(ctx, dir, contender.Runtime{Name: contender.Minicri})
	defer contender.Finally(n.Close)
	opened := time.Since(began)
	for range 100 {
		list.Time(0, func() {
			if listed := len(contender.Must(n.Images.ListImages(ctx, &runtimeapi.ListImagesRequest{})).GetImages()); listed != count {
				contender.Check(fmt.Errorf("%d images are listed of %d", listed, count))
			}
		})
	}
	return []contender.Row{
		contender.Row{What: "snapshot prepared, p50 ms", MostOfOurs: 1}.Medians(prepare),
		contender.Row{What: "snapshot removed, p50 ms", MostOfOurs: 0.5}.Medians(remove),
		contender.Row{What: fmt.Sprintf("ListImages of %d, p50 ms", count), MostOfOurs: 5}.Medians(list),
		{What: "daemon started, serving in ms", Ours: contender.Milliseconds(opened)},
	}
}

// label is a configuration that makes an image's id differ from others'.
func label(text string) v1.Config { return v1.Config{Labels: map[string]string{"bench": text}} }
