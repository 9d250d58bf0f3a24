// Command image measures this runtime's image half against the containerd that
// is installed on the machine: the same image, from the same registry on
// loopback, by CRI PullImage, in turn within one run. Each pull is made by a
// process just started, on a root just made.
//
// The registry is this program again, as a child.
package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"time"

	"github.com/minicri/minicri/test/bench/contender"
)

const (
	// limit ends a run that hangs.
	limit = 5 * time.Minute
	// manyImages is how many images ListImages is timed with.
	manyImages = 1000
)

func main() {
	rounds := flag.Int("rounds", 5, "pulls by each runtime")
	quick := flag.Bool("quick", false, "list 10 images instead of 1000")
	minicri := flag.String("minicri", contender.BesideUs().Minicri, "the daemon to measure")
	registry := flag.String("registry", "", "used by the benchmark for its child: serve a registry, address to this directory")
	flag.Parse()
	contender.Main("image", func(ctx context.Context) error {
		return run(ctx, *registry, options{minicri: *minicri, rounds: *rounds, quick: *quick})
	})
}

type options struct {
	minicri string
	rounds  int
	quick   bool
}

func run(ctx context.Context, registry string, o options) error {
	if registry != "" {
		return serveRegistry(ctx, registry)
	}
	ctx, cancel := context.WithTimeout(ctx, limit)
	defer cancel()
	return bench(ctx, o)
}

func bench(ctx context.Context, o options) (err error) {
	for _, program := range []string{contender.Containerd, o.minicri} {
		if _, err := exec.LookPath(program); err != nil {
			return fmt.Errorf("%w: run make setup build", err)
		}
	}
	dir := contender.Must(os.MkdirTemp("", "mb"))
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	registry := contender.Must(startRegistry(ctx, filepath.Join(dir, "registry")))
	defer registry.Stop()
	reference, shape, err := registry.pushBigImage()
	if err != nil {
		return err
	}
	fmt.Println(shape)
	results := contender.Must(pullInTurn(ctx, dir, reference, o))
	printPulls(results)
	return benchStore(ctx, dir, registry, o)
}
