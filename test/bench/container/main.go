// Command container measures containers of minicri against those of the containerd in PATH:
// in turn within one run, in pods of the same network, from the same image.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"strings"
	"time"

	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

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

// execs are timed in each round.
const execs = 3

// emptyPods times pods without containers: in a network of their own, and in the node's, which takes no plugin.
func (c *comparison) emptyPods(ctx context.Context) {
	var run, stop, hostRun contender.Sample
	c.twice(func(round, i int) {
		n := c.nodes[i]
		var pod *contender.Pod
		run.Time(i, func() { pod = n.RunPod(ctx, fmt.Sprintf("pod%d", round)) })
		stop.Time(i, func() { n.StopPod(ctx, pod.ID) })
		n.RemovePod(ctx, pod.ID)
		hostRun.Time(i, func() { pod = n.RunHostPod(ctx, fmt.Sprintf("host%d", round)) })
		n.RemovePod(ctx, pod.ID)
	}, func() { run, stop, hostRun = contender.Sample{}, contender.Sample{}, contender.Sample{} })
	c.add(
		contender.Row{What: "Run, p50 ms"}.Medians(run),
		contender.Row{What: "Stop, p50 ms"}.Medians(stop),
		contender.Row{What: "host-network Run, p50 ms", MostOfOurs: 10}.Medians(hostRun),
	)
}

// times is how long the parts of containers' lives took: create and start, the first of its
// pod and beside another, stop and remove, remove of one that is stopped, CPU of all that.
type times struct{ first, second, exec, end, remove, cpu contender.Sample }

// lives times containers one by one, in pods of their own.
func (c *comparison) lives(ctx context.Context) {
	var t times
	c.twice(func(round, i int) { t.measure(ctx, i, c.nodes[i], round) }, func() { t = times{} })
	first, further := 0.55, 0.5
	if c.runtime != "" {
		first, further = 0.7, 0.7 // both wait for the same runtime
	}
	c.add(
		contender.Row{What: "create + start, first of its pod, p50 ms", AtMost: first}.Medians(t.first),
		contender.Row{What: "create + start, a further one, p50 ms", AtMost: further}.Medians(t.second),
		contender.Row{What: "ExecSync of true, p50 ms", AtMost: 0.33}.Medians(t.exec),
		contender.Row{What: "stop + remove, p50 ms", AtMost: 0.1}.Medians(t.end),
		contender.Row{What: "remove of a stopped one, p50 ms", AtMost: 0.6}.Medians(t.remove),
		contender.Row{What: fmt.Sprintf("2 such lives with %d execs, p50 ms of CPU", execs)}.Medians(t.cpu),
	)
}

// measure times two containers of a pod of a node.
func (t *times) measure(ctx context.Context, i int, n *contender.Node, round int) {
	pod := n.RunPod(ctx, fmt.Sprintf("life%d", round))
	before := n.CPU(true)
	var ids [2]string
	for k, took := range []*contender.Sample{&t.first, &t.second} {
		took.Time(i, func() { ids[k] = pod.Run(ctx, fmt.Sprintf("app%d", k)) })
	}
	for range execs {
		t.exec.Time(i, func() { execTrue(ctx, n, ids[0]) })
	}
	for _, id := range ids {
		t.end.Time(i, func() {
			contender.Must(n.CRI.StopContainer(ctx, &runtimeapi.StopContainerRequest{ContainerId: id, Timeout: 10}))
			t.remove.Time(i, func() {
				contender.Must(n.CRI.RemoveContainer(ctx, &runtimeapi.RemoveContainerRequest{ContainerId: id}))
			})
		})
	}
	t.cpu[i] = append(t.cpu[i], n.CPU(true)-before)
	n.RemovePod(ctx, pod.ID)
}

func execTrue(ctx context.Context, n *contender.Node, id string) {
	answer := contender.Must(n.CRI.ExecSync(ctx, &runtimeapi.ExecSyncRequest{ContainerId: id, Cmd: []string{"true"}}))
	if code := answer.GetExitCode(); code != 0 {
		contender.Check(fmt.Errorf("%s: true ended with %d", n.Name, code))
	}
}

// probeBlock of the probes are made at one node before it is the other's turn.
const probeBlock = 100

// probes measures what a kubelet's exec probes cost, in a container as users have it: with the runtime's default
// filter of system calls, and its AppArmor profile where the machine has AppArmor. The CPU is user and system time of
// the daemon, its shims and all children that these have waited for: starters, runc, and the command itself.
func (c *comparison) probes(ctx context.Context) {
	var ids [2]string
	var pods [2]*contender.Pod
	for i, n := range c.nodes {
		pods[i] = n.RunPod(ctx, "probed")
		pods[i].Seccomp = runtimeapi.SecurityProfile_RuntimeDefault
		ids[i] = pods[i].Run(ctx, "app")
	}
	var took contender.Sample
	var used [2]time.Duration
	contender.Alternate(c.probeCount/probeBlock, func(_, i int) {
		before := c.nodes[i].CPU(true)
		for range probeBlock {
			took.Time(i, func() { execTrue(ctx, c.nodes[i], ids[i]) })
		}
		time.Sleep(100 * time.Millisecond) // what ends after the answer is waited for
		used[i] += c.nodes[i].CPU(true) - before
	})
	with := "RuntimeDefault, no AppArmor"
	if enabled, _ := os.ReadFile("/sys/module/apparmor/parameters/enabled"); strings.HasPrefix(string(enabled), "Y") {
		with = "RuntimeDefault and AppArmor"
	}
	c.add(contender.Row{
		What: fmt.Sprintf("%d exec probes, %s, ms of CPU", len(took[0]), with), AtMost: 0.5,
		Ours: contender.Milliseconds(used[0]), Theirs: contender.Milliseconds(used[1]),
	}, contender.Row{What: "one of them, p50 ms", AtMost: 0.5}.Medians(took))
	for i, pod := range pods {
		c.nodes[i].RemovePod(ctx, pod.ID)
	}
}
