// Package contender runs the runtimes that a benchmark compares: minicri, and the containerd in PATH. Each has a
// directory of its own; both run in the namespaces of the caller, which hack/in-netns makes.
//
// An error ends the benchmark: Check panics with it, Main prints it, and what is deferred by Finally cleans up on the
// way. Nothing is locked: a benchmark does one thing at a time, so that nothing else is measured.
package contender

import (
	"context"
	"errors"
	"fmt"
	"os"
	"os/signal"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"
	"time"
)

// limit ends a benchmark that hangs. In User-mode Linux, on a busy machine, some take an hour.
const limit = 3 * time.Hour

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

// Catch returns the error that has ended do.
func Catch(do func()) (err error) {
	defer func() {
		switch ended := recover().(type) {
		case nil:
		case failure:
			err = ended.error
		default:
			panic(ended)
		}
	}()
	do()
	return nil
}

// Finally is to be deferred: its error joins the one that ends the benchmark.
func Finally(clean func() error) {
	ended := recover()
	err := clean()
	if failed, ok := ended.(failure); ok {
		err = errors.Join(failed.error, err)
	} else if ended != nil {
		panic(ended)
	}
	Check(err)
}

// Main is the main function of a benchmark, with a directory: ended early, it still cleans up.
func Main(name string, do func(ctx context.Context, dir string)) {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	ctx, cancel := context.WithTimeout(ctx, limit)
	err := Catch(func() {
		dir := Must(os.MkdirTemp("", "mb")) // short: sockets are below it
		defer Finally(func() error { return os.RemoveAll(dir) })
		do(ctx, dir)
	})
	cancel()
	stop()
	if err != nil {
		fmt.Fprintf(os.Stderr, "bench-%s: %v\n", name, err)
		os.Exit(1)
	}
}

// Compare is the main function of a program that compares a node of minicri and one of containerd; they are in this
// order everywhere. Containers run by the program of that name below both, "" is what each has by itself. Pods are in
// the same bridge network, those of minicri in its embedded one if that is asked for.
func Compare(name, engine string, embedded bool, benchmark func(ctx context.Context, nodes [2]*Node)) {
	Main(name, func(ctx context.Context, dir string) {
		ours, theirs := engineConfig(engine)
		runtimes := []Runtime{{Minicri, ours, 0, embedded}, {Containerd, theirs, 1, false}}
		With(ctx, dir, runtimes, func(nodes []*Node) {
			for _, n := range nodes {
				n.Handler = engine
			}
			benchmark(ctx, [2]*Node(nodes))
		})
	})
}

// With starts runtimes with the images of benchmarks, calls do and closes them.
func With(ctx context.Context, dir string, runtimes []Runtime, do func([]*Node)) {
	archive := filepath.Join(dir, "images.tar")
	writeImages(archive)
	var nodes []*Node
	for i, r := range runtimes {
		n := Start(ctx, filepath.Join(dir, strconv.Itoa(i)), r)
		defer Finally(n.Close)
		n.importImages(ctx, archive)
		nodes = append(nodes, n)
	}
	do(nodes)
}

// InFlight is how many calls Parallel makes at once.
const InFlight = 10

// Parallel calls do for 0 to n-1, several at a time, and ends with the first error.
func Parallel(n int, do func(int)) { Burst(n, InFlight, do) }

// Burst is Parallel with so many at a time.
func Burst(n, atOnce int, do func(int)) {
	slots := make(chan struct{}, atOnce)
	errs := make([]error, n)
	var wait sync.WaitGroup
	for i := range n {
		slots <- struct{}{}
		wait.Go(func() {
			defer func() { <-slots }()
			errs[i] = Catch(func() { do(i) })
		})
	}
	wait.Wait()
	for _, err := range errs {
		Check(err)
	}
}
