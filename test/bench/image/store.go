package main

import (
	"context"
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"syscall"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
	"github.com/google/go-containerregistry/pkg/v1/empty"
	"github.com/google/go-containerregistry/pkg/v1/mutate"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/image"
	"github.com/minicri/minicri/test/bench/contender"
)

// snapshotRounds is how many containers' snapshots are made and removed.
const snapshotRounds = 300

// benchStore times what containers need of the store, and ListImages.
func benchStore(ctx context.Context, dir string, registry *benchRegistry, o options) error {
	node := filepath.Join(dir, "n")
	contender.Check(os.Mkdir(node, 0o700))
	root := filepath.Join(node, "root") // as contender has it
	count := manyImages
	if o.quick {
		count = 10
	}
	began := time.Now()
	contender.Check(fillStore(ctx, root, registry, count))
	fmt.Printf("%d small images pulled in %.1f s\n", count, time.Since(began).Seconds())
	syscall.Sync()
	contender.Check(benchSnapshots(ctx, root))
	return benchList(ctx, node, o.minicri)
}

// fillStore pulls images that differ in their configuration alone.
func fillStore(ctx context.Context, root string, registry *benchRegistry, count int) error {
	store := contender.Must(image.Open(ctx, image.Config{Root: root}))
	defer store.Close()
	layer := contender.Must(layerOf(make([]byte, 1024)))
	base := contender.Must(mutate.AppendLayers(empty.Image, layer))
	for i := range count {
		contender.Check(pullSmall(ctx, store, registry, base, i))
	}
	return nil
}

func pullSmall(ctx context.Context, store *image.Store, registry *benchRegistry, base v1.Image, i int) error {
	img := contender.Must(forThisNode(base, fmt.Sprint(i)))
	reference := contender.Must(registry.push(fmt.Sprintf("bench/small%d:1", i), img))
	_, err := store.Pull(ctx, reference, image.Auth{}, nil)
	return err
}

func benchSnapshots(ctx context.Context, root string) error {
	store := contender.Must(image.Open(ctx, image.Config{Root: root}))
	defer store.Close()
	id := store.List()[0].ID
	var prepare, remove []time.Duration
	for i := range snapshotRounds {
		key := fmt.Sprintf("container%d", i)
		began := time.Now()
		contender.Check(store.Prepare(ctx, key, id, image.PrepareOptions{}))
		prepared := time.Now()
		contender.Check(store.RemoveSnapshot(ctx, key))
		prepare, remove = append(prepare, prepared.Sub(began)), append(remove, time.Since(prepared))
	}
	printTime("snapshot prepared, p50", prepare, time.Millisecond)
	printTime("snapshot removed, p50", remove, 500*time.Microsecond)
	return nil
}

func benchList(ctx context.Context, node, minicri string) (err error) {
	began := time.Now()
	process := contender.Must(contender.OfMinicri(programsWith(minicri), "").Start(ctx, node))
	defer func() {
		process.Stop()
		err = errors.Join(err, contender.UnmountBelow(node))
	}()
	connection, err := contender.Connect(ctx, node)
	if err != nil {
		return fmt.Errorf("%w: %s", err, process.Output)
	}
	defer connection.Close()
	opened := time.Since(began)
	client, count := runtimeapi.NewImageServiceClient(connection), 0
	var took []time.Duration
	for range 100 {
		began := time.Now()
		list := contender.Must(client.ListImages(ctx, &runtimeapi.ListImagesRequest{}))
		took, count = append(took, time.Since(began)), len(list.GetImages())
	}
	printTime(fmt.Sprintf("ListImages of %d, p50", count), took, 5*time.Millisecond)
	fmt.Printf("%-28s %8.2f ms\n", "daemon started, serving in", contender.Milliseconds(opened))
	return nil
}

func printTime(title string, took []time.Duration, goal time.Duration) {
	p50 := median(took, func(d time.Duration) time.Duration { return d })
	fmt.Fprintf(os.Stdout, "%-28s %8.2f ms  (to reach %.1f)\n", title, contender.Milliseconds(p50), contender.Milliseconds(goal))
}
