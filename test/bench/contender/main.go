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

// failure is an error that ends a benchmark, on its way to Catch.
type failure struct{ error }

// Check ends the benchmark for an error.
func Check(err error) {
	if err != nil {
		panic(failure{err})
	}
}

// Must is Check of what a call returns beside its result.
func Must[T any](value T, err error) T {
	Check(err)
	return value
}

// Catch returns the error that do returns, or that has ended it.
func Catch(do func() error) (err error) {
	defer func() {
		switch ended := recover().(type) {
		case nil:
		case failure:
			err = ended.error
		default:
			panic(ended)
		}
	}()
	return do()
}

// Main is the main function of a benchmark: ended early, it still cleans up.
func Main(name string, do func(ctx context.Context) error) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	ctx, cancel := context.WithTimeout(ctx, limit)
	err := Catch(func() error { return do(ctx) })
	cancel()
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench-%s: %v\n", name, err)
		os.Exit(1)
	}
}

func run(name string, in setting, benchmark Benchmark) {
	Main(name, func(ctx context.Context) error { return compare(ctx, in, benchmark) })
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
