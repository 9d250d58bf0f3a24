// Command container measures containers of minicri against those of the
// containerd that is installed on the machine: in turn within one run, in pods
// of the same network, from the same image.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"

	"github.com/minicri/minicri/test/bench/contender"
)

func main() {
	var o options
	flag.IntVar(&o.rounds, "rounds", 30, "containers of each runtime that are timed")
	flag.IntVar(&o.probeCount, "probes", 1000, "exec probes of each runtime whose CPU is measured")
	flag.IntVar(&o.pods, "pods", 100, "pods of each runtime that are held")
	flag.IntVar(&o.containers, "containers", 200, "containers of each runtime that are held")
	flag.StringVar(&o.parts, "parts", "pods,lives,probes,held", "what is measured")
	flag.StringVar(&o.runtime, "runtime", "", "runs the containers of both: runc or crun; only their lives are timed then")
	flag.Parse()
	engine, err := contender.FindEngine(o.runtime)
	if err != nil {
		fmt.Fprintln(os.Stderr, "bench-container:", err)
		os.Exit(1)
	}
	contender.MainWith("container", engine, func(ctx context.Context, nodes [2]*contender.Node) error {
		return (&comparison{options: o, nodes: nodes}).run(ctx)
	})
}

type options struct {
	rounds, pods, containers, probeCount int
	runtime, parts                       string
}

// comparison is of two nodes; what belongs to each has the index of the node.
type comparison struct {
	options
	nodes [2]*contender.Node
	rows  []contender.Row
}

func (c *comparison) run(ctx context.Context) error {
	all := map[string]func(context.Context) error{"lives": c.lives, "pods": c.emptyPods, "probes": c.probes, "held": c.held}
	names := strings.Split(c.parts, ",")
	if c.runtime != "" {
		names = []string{"lives"}
	}
	var failed error
	for _, name := range names {
		part, known := all[name]
		if !known {
			return fmt.Errorf("there is no part %q", name)
		}
		if err := part(ctx); err != nil {
			failed = fmt.Errorf("%s: %w", name, err)
			break // what has been measured is printed
		}
	}
	if c.runtime != "" {
		fmt.Printf("\n%d rounds in turn, by %s\n\n", c.rounds, c.runtime)
	} else {
		fmt.Printf("\n%d rounds in turn; %d pods and %d containers held\n\n", c.rounds, c.pods, c.containers)
	}
	contender.PrintTable(os.Stdout, c.rows)
	return failed
}

func (c *comparison) add(row contender.Row) { c.rows = append(c.rows, row) }
