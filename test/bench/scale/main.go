// Command scale measures what many pods cost: at each mark, with so many pods of
// one sleeping container, what an operation takes, what lists take, what idling
// costs, and whose memory is whose. containerd is measured beside minicri as far
// as the machine holds both.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strconv"
	"strings"
	"text/tabwriter"
	"time"

	"github.com/minicri/minicri/test/bench/contender"
)

func main() {
	marks := flag.String("marks", "10,100,300,1000", "numbers of pods at which to measure, rising")
	s := &scale{out: os.Stdout}
	flag.IntVar(&s.theirs, "containerd", 100, "most pods that containerd is given")
	flag.IntVar(&s.burst, "burst", 200, "pods that are made at once where that many are missing")
	flag.IntVar(&s.samples, "samples", 9, "operations of each kind that are timed")
	flag.DurationVar(&s.idle, "idle", time.Minute, "how long the node idles for its CPU time to be told, with 100 pods or more")
	flag.Parse()
	for _, text := range strings.Split(*marks, ",") {
		mark, err := strconv.Atoi(text)
		if err != nil {
			fmt.Fprintln(os.Stderr, "bench-scale: marks:", err)
			os.Exit(2)
		}
		s.marks = append(s.marks, mark)
	}
	contender.MainEmbedded("scale", s.run)
}

type scale struct {
	marks   []int
	theirs  int
	samples int
	burst   int
	idle    time.Duration
	out     *os.File
	rows    []row
}

// row is one runtime at one mark.
type row struct {
	runtime string
	pods    int
	times   times
	owners  contender.Owners
	cpu     time.Duration // of daemon and shims, in the idle time
}

func (s *scale) run(ctx context.Context, nodes [2]*contender.Node) error {
	held := [2]int{}
	for _, mark := range s.marks {
		began := time.Now()
		var rows []row
		for i, n := range nodes {
			if i == 1 && mark > s.theirs {
				continue
			}
			contender.Check(s.fill(ctx, n, held[i], mark))
			held[i] = mark
			r := row{runtime: n.Name, pods: mark}
			if err := r.times.measure(ctx, n, mark, s.samples); err != nil {
				return fmt.Errorf("%s with %d pods: %w", n.Name, mark, err)
			}
			rows = append(rows, r)
		}
		contender.Check(s.rest(nodes, rows, mark))
		s.rows = append(s.rows, rows...)
		fmt.Fprintf(s.out, "%d pods: measured after %v\n", mark, time.Since(began).Round(time.Second))
	}
	return s.print()
}

// fill runs pods until there are as many as the mark says; where a burst of them is
// missing, that many at once, for what they leave behind in the daemon, and then the
// others.
func (s *scale) fill(ctx context.Context, n *contender.Node, held, mark int) error {
	if mark-held >= s.burst && n.Name == contender.Minicri {
		contender.Check(s.hold(ctx, n, held, held+s.burst, s.burst))
		held += s.burst
	}
	return s.hold(ctx, n, held, mark, contender.InFlight)
}

// hold runs the pods of these numbers, so many at once.
func (s *scale) hold(ctx context.Context, n *contender.Node, from, to, atOnce int) error {
	return contender.Burst(to-from, atOnce, func(k int) error {
		pod, err := n.RunPod(ctx, fmt.Sprintf("held%d", from+k))
		if err == nil {
			_, err = pod.Run(ctx, "app", contender.App)
		}
		return err
	})
}

// settle is how long idle processes have to give memory back.
const settle = 10 * time.Second

// idleFrom is the lowest mark at which the node idles: the one below is what the others
// are compared with, and few pods cost nothing.
const idleFrom = 100

// rest has the nodes of the rows idle, both at once, and tells what that costs and whose
// memory is whose.
func (s *scale) rest(nodes [2]*contender.Node, rows []row, mark int) error {
	time.Sleep(settle)
	for i := range rows {
		before := contender.Must(nodes[i].CPU())
		rows[i].cpu = -before
	}
	if mark >= idleFrom {
		time.Sleep(s.idle)
	}
	for i := range rows {
		after := contender.Must(nodes[i].CPU())
		rows[i].cpu += after
		rows[i].owners = contender.Must(nodes[i].Owners())
	}
	return nil
}

func (s *scale) print() error {
	fmt.Fprintf(s.out, "\np50 of %d operations in ms; CPU in ms for each %v of idling; memory in MiB\n\n", s.samples, s.idle)
	table := tabwriter.NewWriter(s.out, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprintln(table, "\tpods\trun\thost run\tcreate+start\tstop pod\tpods\tcontainers\tcontainer stats\tpod stats\tCPU idle\tdaemon\tshims\tpauses\tthreads of daemon\tof shims\t")
	for _, r := range s.rows {
		fmt.Fprintf(table, "%s\t%d\t", r.runtime, r.pods)
		for _, t := range r.times.all() {
			fmt.Fprintf(table, "%.2f\t", contender.Milliseconds(contender.Quantile(t, 0.5)))
		}
		o := r.owners
		fmt.Fprintf(table, "%.0f\t%.1f\t%.1f\t%.1f\t%d\t%d\t\n", contender.Milliseconds(r.cpu), mib(o.Daemon), mib(o.Shims), mib(o.Pauses), o.Daemon.Threads, o.Shims.Threads)
	}
	contender.Check(table.Flush())
	s.printSlopes()
	s.printGoals()
	return nil
}

func mib(o contender.Owner) float64 { return float64(o.KiB) / 1024 }

// printSlopes prints what one pod more costs, between marks that follow each
// other.
func (s *scale) printSlopes() {
	fmt.Fprintln(s.out)
	for i, r := range s.rows {
		for _, later := range s.rows[i+1:] {
			if later.runtime == r.runtime {
				slope := float64(later.owners.KiB()-r.owners.KiB()) / float64(later.pods-r.pods)
				fmt.Fprintf(s.out, "%s: a pod costs %.0f KiB between %d and %d pods; Run at %d is %.2f of that at %d, host-network Run %.2f\n", r.runtime, slope, r.pods, later.pods,
					later.pods, ratio(later.times.run, r.times.run), r.pods, ratio(later.times.hostRun, r.times.hostRun))
				break
			}
		}
	}
}

func ratio(later, earlier []time.Duration) float64 {
	return float64(contender.Quantile(later, 0.5)) / float64(contender.Quantile(earlier, 0.5))
}
