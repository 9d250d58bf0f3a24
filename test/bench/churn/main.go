// Command churn makes and removes pods of one container for as long as it is
// given, all below one supervisor, and prints whether the memory, descriptors and
// threads of daemon and supervisor stay as they are.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"text/tabwriter"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/bench/contender"
)

func main() {
	c := &churn{out: os.Stdout}
	flag.IntVar(&c.lives, "lives", 100_000, "pods and containers that are made and removed")
	flag.DurationVar(&c.limit, "limit", 15*time.Minute, "ends it before")
	flag.IntVar(&c.atOnce, "at-once", 8, "lives side by side")
	flag.Parse()
	contender.Main("churn", c.run)
}

type churn struct {
	lives, atOnce int
	limit         time.Duration
	out           *os.File
	samples       []sample
}

// sample is what there is after so many lives.
type sample struct {
	lives            int
	owners           contender.Owners
	ours, supervisor int // descriptors
}

const (
	// parts is how often is looked, in equal parts of the lives or of the time.
	parts = 10
	// settle is how long idle processes have to give memory back before.
	settle = 6 * time.Second
	// slice is how many lives there are between two looks at the clock.
	slice = 40
)

func (c *churn) run(ctx context.Context, nodes [2]*contender.Node) error {
	n := nodes[0]
	// One pod stays, so that it is one supervisor from the beginning to the end.
	stays, err := n.RunPod(ctx, "stays")
	if err != nil {
		return err
	}
	if _, err := stays.Run(ctx, "app", contender.App); err != nil {
		return err
	}
	began := time.Now()
	done := 0
	for part := range parts + 1 {
		for until := c.limit * time.Duration(part) / parts; done < c.lives*part/parts && time.Since(began) < until; done += slice {
			if err := contender.Burst(slice, c.atOnce, func(k int) error { return life(ctx, n, fmt.Sprint("life", done+k)) }); err != nil {
				return fmt.Errorf("after %d lives: %w", done, err)
			}
		}
		if err := c.look(ctx, n, done); err != nil {
			return err
		}
	}
	fmt.Fprintf(c.out, "\n%d pods and containers made and removed in %v\n\n", done, time.Since(began).Round(time.Second))
	return c.print()
}

// life is that of a pod with one container, in the node's network: no plugin is
// measured.
func life(ctx context.Context, n *contender.Node, name string) error {
	pod, err := n.RunPodIn(ctx, name, runtimeapi.NamespaceMode_NODE)
	if err != nil {
		return err
	}
	if _, err := pod.Run(ctx, "app", contender.App); err != nil {
		return err
	}
	return n.RemovePod(ctx, pod.ID)
}

func (c *churn) look(ctx context.Context, n *contender.Node, lives int) error {
	select {
	case <-time.After(settle):
	case <-ctx.Done():
		return ctx.Err()
	}
	s := sample{lives: lives}
	var err error
	if s.owners, err = n.Owners(); err != nil {
		return err
	}
	if s.owners.Shims.Processes != 1 || s.owners.Pauses.Processes != 1 {
		return fmt.Errorf("after %d lives there are %d supervisors and %d pause processes, want one of each", lives, s.owners.Shims.Processes, s.owners.Pauses.Processes)
	}
	if s.ours, s.supervisor, err = n.Descriptors(); err != nil {
		return err
	}
	c.samples = append(c.samples, s)
	return nil
}

func (c *churn) print() error {
	table := tabwriter.NewWriter(c.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "lives\tdaemon, MiB\tthreads\tdescriptors\tsupervisor, MiB\tthreads\tdescriptors\t")
	for _, s := range c.samples {
		fmt.Fprintf(table, "%d\t%.1f\t%d\t%d\t%.1f\t%d\t%d\t\n", s.lives, float64(s.owners.Daemon.KiB)/1024, s.owners.Daemon.Threads, s.ours,
			float64(s.owners.Shims.KiB)/1024, s.owners.Shims.Threads, s.supervisor)
	}
	fmt.Fprintln(table)
	for _, line := range []struct {
		what string
		of   func(sample) float64
		most float64 // for each 1000 lives
	}{
		{"daemon, KiB", func(s sample) float64 { return float64(s.owners.Daemon.KiB) }, 100},
		{"daemon, threads", func(s sample) float64 { return float64(s.owners.Daemon.Threads) }, 0.5},
		{"daemon, descriptors", func(s sample) float64 { return float64(s.ours) }, 0.5},
		{"supervisor, KiB", func(s sample) float64 { return float64(s.owners.Shims.KiB) }, 20},
		{"supervisor, threads", func(s sample) float64 { return float64(s.owners.Shims.Threads) }, 0.5},
		{"supervisor, descriptors", func(s sample) float64 { return float64(s.supervisor) }, 0.5},
	} {
		slope, verdict := 1000*c.slope(line.of), "flat"
		if slope > line.most {
			verdict = "NOT flat"
		}
		fmt.Fprintf(c.out, "%s: %+.2f for each 1000 lives, to reach <= %g: %s\n", line.what, slope, line.most, verdict)
	}
	fmt.Fprintln(c.out)
	return table.Flush()
}

// slope is the growth with each life, of the line with the least squares, without
// the first sample: what the first lives make, such as caches, stays.
func (c *churn) slope(of func(sample) float64) float64 {
	samples := c.samples[1:]
	var x, y, xx, xy float64
	for _, s := range samples {
		lives := float64(s.lives)
		x, y, xx, xy = x+lives, y+of(s), xx+lives*lives, xy+lives*of(s)
	}
	n := float64(len(samples))
	if n*xx == x*x {
		return 0
	}
	return (n*xy - x*y) / (n*xx - x*x)
}
