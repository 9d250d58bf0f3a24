package contender

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"syscall"
	"time"
)

// limit ends a benchmark that hangs. In User-mode Linux, on a busy machine, some take an
// hour.
const limit = 3 * time.Hour

// Benchmark compares a node of minicri and one of containerd. They are in this
// order everywhere.
type Benchmark func(ctx context.Context, nodes [2]*Node) error

// MainWith is the main function of a program that compares, with pods that an engine
// runs, in both.
func MainWith(name string, engine Engine, benchmark Benchmark) {
	run(name, setting{engine: engine}, benchmark)
}

// MainEmbedded is that of one with minicri's pods in its embedded network. Those of
// containerd are in the same bridge network as in the other benchmarks.
func MainEmbedded(name string, benchmark Benchmark) { run(name, setting{embedded: true}, benchmark) }

// setting is what benchmarks have different from each other.
type setting struct {
	engine   Engine
	embedded bool
}

func run(name string, in setting, benchmark Benchmark) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	ctx, cancel := context.WithTimeout(ctx, limit)
	err := compare(ctx, in, benchmark)
	cancel()
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench-%s: %v\n", name, err)
		os.Exit(1)
	}
}

func compare(ctx context.Context, in setting, benchmark Benchmark) (err error) {
	dir, err := os.MkdirTemp("", "mb") // short: sockets are below it
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, os.RemoveAll(dir)) }()
	nodes, err := startNodes(ctx, dir, in)
	defer func() { err = errors.Join(err, closeNodes(nodes)) }()
	if err != nil {
		return err
	}
	return benchmark(ctx, [2]*Node(nodes))
}
