// Command container measures containers of minicri against those of the containerd in PATH:
// in turn within one run, in pods of the same network, from the same image.
package main

import (
	"context"
	"flag"
	"fmt"
	"strings"

	"github.com/minicri/minicri/test/bench/contender"
)

func main() {
	var c comparison
	flag.IntVar(&c.rounds, "rounds", 30, "containers of each runtime that are timed")
	flag.IntVar(&c.probeCount, "probes", 1000, "exec probes of each runtime whose CPU is measured")
	parts := flag.String("parts", "pods,lives,probes", "what is measured")
	flag.StringVar(&c.runtime, "runtime", "", "runs the containers of both: runc or crun; only their lives are timed then")
	flag.Parse()
	if c.runtime != "" {
		*parts = "lives"
	}
	contender.Compare("container", c.runtime, false, func(ctx context.Context, nodes [2]*contender.Node) {
		c.nodes = nodes
		defer func() { // what has been measured is printed
			fmt.Printf("\n%d rounds in turn\n", c.rounds)
			contender.PrintTable(c.rows...)
		}()
		all := map[string]func(context.Context){"lives": c.lives, "pods": c.emptyPods, "probes": c.probes}
		for name := range strings.SplitSeq(*parts, ",") {
			if all[name] == nil {
				contender.Check(fmt.Errorf("there is no part %q", name))
			}
			all[name](ctx)
		}
	})
}

// comparison is of two nodes; what belongs to each has the index of the node.
type comparison struct {
	rounds, probeCount int
	runtime            string
	nodes              [2]*contender.Node
	rows               []contender.Row
}

func (c *comparison) add(rows ...contender.Row) { c.rows = append(c.rows, rows...) }

// twice does one thing with each node in turn; rounds that are to warm up come first, and are not kept.
func (c *comparison) twice(do func(round, node int), reset func()) {
	contender.Alternate(2, do)
	reset()
	contender.Alternate(c.rounds, do)
}
