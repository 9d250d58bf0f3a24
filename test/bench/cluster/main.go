// Command cluster compares minicri with Debian's containerd under the same
// kubelet: for each a cluster of one node is made by hack/cluster, the same pods
// are applied, and what is seen by a watch of the API server is printed side by
// side, with the ratio of minicri to containerd.
package main

import (
	"context"
	"fmt"
	"os"
	"os/exec"
	"os/signal"
	"path/filepath"
	"syscall"
	"time"
)

func main() {
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	err := run(ctx)
	stop()
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-cluster:", err)
		os.Exit(1)
	}
}

// runtimes are compared in this order.
var runtimes = []string{"minicri", "containerd"}

func run(ctx context.Context) error {
	results := make(map[string]map[string]float64)
	for _, runtime := range runtimes {
		measured, err := measureRuntime(ctx, runtime)
		if err != nil {
			return fmt.Errorf("%s: %w", runtime, err)
		}
		results[runtime] = measured
	}
	fmt.Printf("%-58s %12s %12s %8s\n", "", runtimes[0], runtimes[1], "ratio")
	for _, row := range rows {
		own, other := results[runtimes[0]][row], results[runtimes[1]][row]
		fmt.Printf("%-58s %12.2f %12.2f %8.2f\n", row, own, other, own/other)
	}
	return nil
}

// measureRuntime makes a cluster, measures, and takes it down.
func measureRuntime(ctx context.Context, runtime string) (results map[string]float64, err error) {
	name := "bench-" + runtime
	tool, err := filepath.Abs("bin/cluster")
	if err != nil {
		return nil, err
	}
	cluster := func(arguments ...string) error {
		command := exec.Command(tool, append([]string{"--name", name}, arguments...)...)
		command.Stdout, command.Stderr = os.Stderr, os.Stderr
		return command.Run()
	}
	if err := cluster("up", "--nodes", "1", "--runtime", runtime); err != nil {
		return nil, err
	}
	defer func() {
		if down := cluster("down"); err == nil {
			err = down
		}
	}()
	a, err := newAPI(ctx, name)
	if err != nil {
		return nil, err
	}
	defer a.close()
	b := &bench{api: a, results: make(map[string]float64), processes: processesOf(name)}
	for _, measure := range []func(context.Context) error{b.single, b.together(20, rowTwenty), b.together(60, rowSixty), b.idle, b.job} {
		if err := measure(ctx); err != nil {
			return nil, err
		}
		time.Sleep(2 * time.Second) // what the last one left to do
	}
	return b.results, nil
}
