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
	if err := os.Mkdir(node, 0o700); err != nil {
		return err
	}
	root := filepath.Join(node, "root") // as contender has it
	count := manyImages
	if o.quick {
		count = 10
	}
	began := time.Now()
	if err := fillStore(ctx, root, registry, count); err != nil {
		return err
	}
	fmt.Printf("%d small images pulled in %.1f s\n", count, time.Since(began).Seconds())
	syscall.Sync()
	if err := benchSnapshots(ctx, root); err != nil {
		return err
	}
	return benchList(ctx, node, o.minicri)
}

// fillStore pulls images that differ in their configuration alone.
func fillStore(ctx context.Context, root string, registry *benchRegistry, count int) error {
	store, err := image.Open(ctx, image.Config{Root: root})
	if err != nil {
		return err
	}
	defer store.Close()
	layer, err := layerOf(make([]byte, 1024)) // an empty tar
	if err != nil {
		return err
	}
	base, err := mutate.AppendLayers(empty.Image, layer)
	if err != nil {
		return err
	}
	for i := range count {
		if err := pullSmall(ctx, store, registry, base, i); err != nil {
			return err
		}
	}
	return nil
}

func pullSmall(ctx context.Context, store *image.Store, registry *benchRegistry, base v1.Image, i int) error {
	img, err := forThisNode(base, fmt.Sprint(i))
	if err != nil {
		return err
	}
	reference, err := registry.push(fmt.Sprintf("bench/small%d:1", i), img)
	if err != nil {
		return err
	}
	_, err = store.Pull(ctx, reference, image.Auth{}, nil)
	return err
}

func benchSnapshots(ctx context.Context, root string) error {
	store, err := image.Open(ctx, image.Config{Root: root})
	if err != nil {
		return err
	}
	defer store.Close()
	id := store.List()[0].ID
	var prepare, remove []time.Duration
	for i := range snapshotRounds {
		key := fmt.Sprintf("container%d", i)
		began := time.Now()
		if err := store.Prepare(ctx, key, id, image.PrepareOptions{}); err != nil {
			return err
		}
		prepared := time.Now()
		if err := store.RemoveSnapshot(ctx, key); err != nil {
			return err
		}
		prepare, remove = append(prepare, prepared.Sub(began)), append(remove, time.Since(prepared))
	}
	printTime("snapshot prepared, p50", prepare, time.Millisecond)
	printTime("snapshot removed, p50", remove, 500*time.Microsecond)
	return nil
}

func benchList(ctx context.Context, node, minicri string) (err error) {
	began := time.Now()
	process, err := contender.OfMinicri(programsWith(minicri), "").Start(ctx, node)
	if err != nil {
		return err
	}
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
		list, err := client.ListImages(ctx, &runtimeapi.ListImagesRequest{})
		if err != nil {
			return err
		}
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
