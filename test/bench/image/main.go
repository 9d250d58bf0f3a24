// Command image measures this runtime's image half against the containerd that
// is installed on the machine: the same image, from the same registry on
// loopback, by CRI PullImage, in turn within one run. Each pull is made by a
// process just started, on a root just made.
//
// The registry and this runtime's image service are this program again, as
// children, so that their time and memory are counted apart from the
// benchmark's.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

const (
	// limit ends a run that hangs.
	limit = 5 * time.Minute
	// manyImages is how many images ListImages is timed with.
	manyImages = 1000
)

func main() {
	rounds := flag.Int("rounds", 5, "pulls by each runtime")
	quick := flag.Bool("quick", false, "leave out the list of 1000 images")
	role := flag.String("role", "", "used by the benchmark for its children: registry or serve")
	at := flag.String("at", "", "directory of the child")
	noSync := flag.Bool("nosync", false, "the child does not flush what it unpacked")
	flag.Parse()
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	if err := run(ctx, *role, *at, *noSync, *rounds, *quick); err != nil {
		fmt.Fprintln(os.Stderr, "bench image:", err)
		os.Exit(1)
	}
}

func run(ctx context.Context, role, at string, noSync bool, rounds int, quick bool) error {
	switch role {
	case "registry":
		return serveRegistry(ctx, at)
	case "serve":
		return serveImages(ctx, at, noSync)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return bench(ctx, rounds, quick)
}

func bench(ctx context.Context, rounds int, quick bool) error {
	if _, err := exec.LookPath("containerd"); err != nil {
		return fmt.Errorf("containerd, which this compares with, is missing: run make setup")
	}
	dir, err := os.MkdirTemp("", "minicri-bench-image-")
	if err != nil {
		return err
	}
	defer os.RemoveAll(dir)
	registry, err := startRegistry(ctx, filepath.Join(dir, "registry"))
	if err != nil {
		return err
	}
	defer registry.stop()
	reference, shape, err := registry.pushBigImage()
	if err != nil {
		return err
	}
	fmt.Println(shape)
	results, err := pullInTurn(ctx, dir, reference, rounds)
	if err != nil {
		return err
	}
	printPulls(results)
	return benchStore(ctx, dir, registry, quick)
}
