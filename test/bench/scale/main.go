// Command scale measures what many pods cost: at each mark, with so many pods of one sleeping container, what an
// operation takes, what lists take, what idling costs, and whose memory is whose. containerd is measured beside
// minicri as far as the machine holds both.
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

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/minicri/minicri/test/bench/contender"
)

func main() {
	var s scale
	marks := flag.String("marks", "10,100,300,1000", "numbers of pods at which to measure, rising")
	flag.IntVar(&s.theirs, "containerd", 100, "most pods that containerd is given")
	flag.IntVar(&s.burst, "burst", 200, "pods that are made at once where that many are missing")
	flag.IntVar(&s.samples, "samples", 9, "operations of each kind that are timed")
	flag.DurationVar(&s.idle, "idle", time.Minute, "how long the node idles for its CPU time to be told, with 100 pods or more")
	flag.Parse()
	contender.Compare("scale", "", true, func(ctx context.Context, nodes [2]*contender.Node) {
		held := 0
		for text := range strings.SplitSeq(*marks, ",") {
			mark := contender.Must(strconv.Atoi(text))
			s.measure(ctx, nodes, held, mark)
			held = mark
			s.print() // the next mark may take an hour
		}
	})
}

type scale struct {
	theirs, samples, burst int
	idle                   time.Duration
	rows                   []*row
}

// operations are what is timed, in the order of the table, with the most of the ratio of our
// time at the last mark to that at the first.
var operations = []struct {
	name   string
	atMost float64
}{
	{"run", 1.5}, {"host run", 1.3}, {"create+start", 1.3}, {"stop pod", 1.3}, {"pods", 0}, {"containers", 0}, {"container stats", 0}, {"pod stats", 0},
}

// row is one runtime at one mark.
type row struct {
	runtime string
	pods    int
	took    contender.Times
	owners  contender.Owners
	cpu     time.Duration // of daemon and shims, in the idle time
}

const (
	// settle is how long idle processes have to give memory back.
	settle = 10 * time.Second
	// idleFrom is the lowest mark at which the nodes idle: the one below is what the others
	// are compared with, and few pods cost nothing.
	idleFrom = 100
)

// measure adds a row for each node, which then idle, all at once.
func (s *scale) measure(ctx context.Context, nodes [2]*contender.Node, held, mark int) {
	began := time.Now()
	measured := nodes[:1]
	if mark <= s.theirs {
		measured = nodes[:]
	}
	rows := make([]*row, len(measured))
	for i, n := range measured {
		s.fill(ctx, n, held, mark)
		rows[i] = &row{runtime: n.Name, pods: mark, took: contender.Times{}}
		for k := range s.samples {
			rows[i].live(ctx, n, fmt.Sprintf("sample%d-%d", mark, k))
			rows[i].list(ctx, n)
		}
	}
	time.Sleep(settle)
	for i, n := range measured {
		rows[i].cpu = -n.CPU(false)
	}
	if mark >= idleFrom {
		time.Sleep(s.idle)
	}
	for i, n := range measured {
		rows[i].cpu += n.CPU(false)
		rows[i].owners = n.Owners()
	}
	s.rows = append(s.rows, rows...)
	fmt.Printf("%d pods: measured after %v\n", mark, time.Since(began).Round(time.Second))
}

// fill runs pods until there are as many as the mark says; where a burst of them is
// missing, that many at once, for what they leave behind in the daemon, and then the others.
func (s *scale) fill(ctx context.Context, n *contender.Node, held, mark int) {
	run := func(k int) { n.RunPod(ctx, fmt.Sprintf("held%d", k)).Run(ctx, "app") }
	if mark-held >= s.burst && n.Name == contender.Minicri {
		contender.Burst(s.burst, s.burst, func(k int) { run(held + k) })
		held += s.burst
	}
	contender.Parallel(mark-held, func(k int) { run(held + k) })
}

// live is the life of one pod, and of one in the node's network, which runs no plugin.
func (r *row) live(ctx context.Context, n *contender.Node, name string) {
	var pod *contender.Pod
	r.took.Time("run", func() { pod = n.RunPod(ctx, name) })
	r.took.Time("create+start", func() { pod.Run(ctx, "app") })
	r.took.Time("stop pod", func() { n.StopPod(ctx, pod.ID) })
	n.RemovePod(ctx, pod.ID)
	r.took.Time("host run", func() { pod = n.RunHostPod(ctx, name) })
	n.RemovePod(ctx, pod.ID)
}

func (r *row) list(ctx context.Context, n *contender.Node) {
	for name, list := range map[string]func() int{
		"pods": func() int {
			return len(contender.Must(n.CRI.ListPodSandbox(ctx, &runtimeapi.ListPodSandboxRequest{})).GetItems())
		},
		"containers": func() int {
			return len(contender.Must(n.CRI.ListContainers(ctx, &runtimeapi.ListContainersRequest{})).GetContainers())
		},
		"container stats": func() int {
			return len(contender.Must(n.CRI.ListContainerStats(ctx, &runtimeapi.ListContainerStatsRequest{})).GetStats())
		},
		"pod stats": func() int {
			return len(contender.Must(n.CRI.ListPodSandboxStats(ctx, &runtimeapi.ListPodSandboxStatsRequest{})).GetStats())
		},
	} {
		r.took.Time(name, func() {
			if count := list(); count != r.pods {
				contender.Check(fmt.Errorf("%s: %d %s are listed of %d", r.runtime, count, name, r.pods))
			}
		})
	}
}

func (s *scale) print() {
	fmt.Printf("\np50 of %d operations in ms; CPU in ms for each %v of idling; memory in MiB\n\n", s.samples, s.idle)
	table := tabwriter.NewWriter(os.Stdout, 0, 0, 2, ' ', tabwriter.AlignRight)
	fmt.Fprint(table, "\tpods\t")
	for _, o := range operations {
		fmt.Fprint(table, o.name+"\t")
	}
	fmt.Fprintln(table, "CPU idle\tdaemon\tshims\tpauses\tthreads of daemon\tof shims\t")
	for _, r := range s.rows {
		fmt.Fprintf(table, "%s\t%d\t", r.runtime, r.pods)
		for _, o := range operations {
			fmt.Fprintf(table, "%.2f\t", r.took.P50(o.name))
		}
		o := r.owners
		fmt.Fprintf(table, "%.0f\t%.1f\t%.1f\t%.1f\t%d\t%d\t\n",
			contender.Milliseconds(r.cpu), o.Daemon.MiB(), o.Shims.MiB(), o.Pauses.MiB(), o.Daemon.Threads, o.Shims.Threads)
	}
	contender.Check(table.Flush())
	goals := s.goals(contender.Minicri)
	for _, theirs := range s.goals(contender.Containerd) {
		for i, ours := range goals {
			if ours.What == theirs.What {
				goals[i].Theirs = theirs.Ours
			}
		}
	}
	contender.PrintTable(goals...)
}

// goals are what can be told of a runtime from the marks that were measured, beside its first one.
func (s *scale) goals(name string) (goals []contender.Row) {
	var first, last *row
	for _, r := range s.rows {
		if r.runtime != name {
			continue
		}
		with := fmt.Sprintf(" with %d pods", r.pods)
		if r.pods >= 100 {
			goals = append(goals, contender.Row{What: "threads of the supervisor" + with, Ours: float64(r.owners.Shims.Threads), MostOfOurs: 24},
				contender.Row{What: "threads of the daemon" + with, Ours: float64(r.owners.Daemon.Threads), MostOfOurs: 40})
		}
		if r.pods >= 100 && r.pods < 200 {
			shims := r.owners.Shims.MiB()
			goals = append(goals, contender.Row{What: "supervisor, starter included," + with + ", MiB", Ours: shims, MostOfOurs: 25},
				contender.Row{What: "daemon and supervisor" + with + ", MiB", Ours: r.owners.Daemon.MiB() + shims, MostOfOurs: 45})
		}
		if last = r; first == nil {
			first = r
			continue
		}
		slope := float64(r.owners.KiB()-first.owners.KiB()) / float64(r.pods-first.pods)
		what := fmt.Sprintf("memory of a pod between %d and %d, KiB", first.pods, r.pods)
		goals = append(goals, contender.Row{What: what, Ours: slope, MostOfOurs: 250})
	}
	for _, o := range operations {
		if o.atMost > 0 && first != last {
			what := fmt.Sprintf("%s with %d pods, of that with %d", o.name, last.pods, first.pods)
			goals = append(goals, contender.Row{What: what, Ours: last.took.P50(o.name) / first.took.P50(o.name), MostOfOurs: o.atMost})
		}
	}
	return goals
}
