// Command stream measures exec and port-forward of minicri against those of
// the containerd that is installed on the machine: in turn within one run, over
// SPDY, by the client library of Kubernetes.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"

	"github.com/minicri/minicri/test/bench/contender"
)

func main() {
	var o options
	flag.IntVar(&o.starts, "starts", 60, "execs of each runtime whose first byte is timed")
	flag.IntVar(&o.transfers, "transfers", 7, "transfers of each runtime and each kind")
	flag.Parse()
	contender.Main("stream", func(ctx context.Context, nodes [2]*contender.Node) error { return run(ctx, nodes, o) })
}

type options struct{ starts, transfers int }

func run(ctx context.Context, nodes [2]*contender.Node, o options) error {
	var targets [2]*target
	for i, n := range nodes {
		pod, err := n.RunPod(ctx, "stream")
		if err != nil {
			return err
		}
		targets[i] = &target{node: n, pod: pod}
		if targets[i].container, err = pod.Run(ctx, "app", serve...); err != nil {
			return err
		}
	}
	first, err := firstBytes(ctx, targets, o.starts)
	if err != nil {
		return err
	}
	rows := []contender.Row{first}
	for _, kind := range []transfer{{"exec output", (*target).execOutput}, {"port-forward", (*target).forward}} {
		more, err := kind.compare(ctx, targets, o.transfers)
		if err != nil {
			return err
		}
		rows = append(rows, more...)
	}
	fmt.Printf("\n%d starts and %d transfers of %d MiB in turn\n\n", o.starts, o.transfers, transferMiB)
	contender.PrintTable(os.Stdout, rows)
	return nil
}
