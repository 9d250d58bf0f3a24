// Command churn makes and removes pods and containers for as long as it is given, all
// below one supervisor, and prints whether the memory, descriptors and threads of
// daemon and supervisor stay as they are. A pod has one container after the other, each
// with commands, so that in the same time there are several times as many lives as of
// pods alone.
package main

import (
	"context"
	"flag"
	"fmt"
	"math"
	"os"
	"text/tabwriter"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/bench/contender"
)

func main() {
	c := &churn{out: os.Stdout}
	flag.IntVar(&c.lives, "lives", 100_000, "pods and containers that are made and removed, each counts")
	flag.DurationVar(&c.limit, "limit", 15*time.Minute, "ends it before")
	flag.IntVar(&c.atOnce, "at-once", 8, "lives side by side")
	flag.IntVar(&c.within, "within", 8, "containers of a pod, one after the other, each with two commands; 0 for pods of one container")
	flag.Parse()
	contender.Main("churn", c.run)
}

type churn struct {
	lives, atOnce int
	within        int
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
	parts = 15
	// settle is how long idle processes have to give memory back before: the daemon looks
	// every four seconds, and a second time after it has.
	settle = 10 * time.Second
	// slice is how many lives there are between two looks at the clock.
	slice = 8
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
	done, each := 0, 1+max(1, c.within) // a pod and its containers
	for part := range parts + 1 {
		for until := c.limit * time.Duration(part) / parts; done < c.lives*part/parts && time.Since(began) < until; done += slice * each {
			if err := contender.Burst(slice, c.atOnce, func(k int) error { return c.life(ctx, n, fmt.Sprint("life", done+k)) }); err != nil {
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

// life is that of a pod, in the node's network: no plugin is measured.
func (c *churn) life(ctx context.Context, n *contender.Node, name string) error {
	pod, err := n.RunPodIn(ctx, name, runtimeapi.NamespaceMode_NODE)
	if err != nil {
		return err
	}
	for k := range c.within {
		if err := lifeWithin(ctx, pod, fmt.Sprint("app", k)); err != nil {
			return err
		}
	}
	if c.within == 0 {
		if _, err := pod.Run(ctx, "app", contender.App); err != nil {
			return err
		}
	}
	return n.RemovePod(ctx, pod.ID)
}

// lifeWithin is that of a container: started, two commands, stopped and removed.
func lifeWithin(ctx context.Context, pod *contender.Pod, name string) error {
	id, err := pod.Run(ctx, name, contender.App)
	if err != nil {
		return err
	}
	for range 2 {
		if _, err := pod.Node.CRI.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"/bin/true"}, Timeout: 60}); err != nil {
			return fmt.Errorf("command in %s: %w", name, err)
		}
	}
	if err := pod.Node.StopContainer(ctx, id); err != nil {
		return err
	}
	return pod.Node.RemoveContainer(ctx, id)
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
		slope, deviation := c.slope(line.of)
		slope, deviation = 1000*slope, 1000*deviation
		fmt.Fprintf(c.out, "%s: %+.2f ± %.2f for each 1000 lives, to reach <= %g: %s\n", line.what, slope, deviation, line.most, verdict(slope, deviation, line.most))
	}
	fmt.Fprintln(c.out)
	return table.Flush()
}

// verdict says what a slope with its standard error, twice that to either side, shows.
func verdict(slope, deviation, most float64) string {
	switch {
	case slope+2*deviation <= most:
		return "flat"
	case slope-2*deviation > most:
		return "NOT flat"
	default:
		return "too few lives to tell"
	}
}

// slope is the growth with each life, of the line with the least squares, and its
// standard error. The first quarter of the samples does not count: what the first lives
// make, such as caches, stays.
func (c *churn) slope(of func(sample) float64) (slope, deviation float64) {
	samples := c.samples[len(c.samples)/4:]
	var x, y, xx, xy float64
	for _, s := range samples {
		lives := float64(s.lives)
		x, y, xx, xy = x+lives, y+of(s), xx+lives*lives, xy+lives*of(s)
	}
	n := float64(len(samples))
	if n < 3 || n*xx == x*x {
		return 0, math.Inf(1)
	}
	slope = (n*xy - x*y) / (n*xx - x*x)
	begin, off := (y-slope*x)/n, 0.0
	for _, s := range samples {
		miss := of(s) - begin - slope*float64(s.lives)
		off += miss * miss
	}
	return slope, math.Sqrt(off / (n - 2) / (xx - x*x/n))
}
